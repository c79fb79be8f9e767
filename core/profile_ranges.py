"""Names for the parts of a step, for whoever measures them: the worker's profiler, or a script's clock."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
_record: Callable[[str], AbstractContextManager[object]] | None = None


def record_ranges(record: Callable[[str], AbstractContextManager[object]] | None) -> None:
    """Every range enters `record(name)` from now on. With None, as at first, ranges cost nothing to speak of."""
    global _record
    _record = record


def profile_range(name: str) -> AbstractContextManager[object]:
    """To be entered by the thread that runs the steps."""
    return _NOTHING if _record is None else _record(name)
