"""Names for the parts of a step in the profiler's traces, switched on and off by the worker that runs the profiler."""

import contextlib
from contextlib import AbstractContextManager

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
_recording = False


def record_ranges(recording: bool) -> None:
    """Until this is called with True, and after False, ranges are empty and cost nothing to speak of."""
    global _recording
    _recording = recording


def profile_range(name: str) -> AbstractContextManager[object]:
    """To be entered by the thread that the profiler watches: the one that runs the steps."""
    if not _recording:
        return _NOTHING
    from torch.profiler import record_function

    return record_function(name)
