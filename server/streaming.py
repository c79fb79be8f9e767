"""One completion, piece by piece, from a sync engine: what `generate` and `chat` print. Knows how to be interrupted."""

import contextlib
import itertools
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from ..engine.llm_engine import LLMEngine
    from ..protocol.params import SamplingParams

_request_numbers = itertools.count()


class Interruption:
    """While entered, Ctrl-C only sets `requested`; one more before it is taken raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def take(self) -> bool:
        """Whether Ctrl-C was pressed since the last time; that one is then done with."""
        requested, self.requested = self.requested, False
        return requested

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Within, Ctrl-C raises KeyboardInterrupt at once; so does one that came shortly before and was not taken."""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.take():
                raise KeyboardInterrupt
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def stream_text(
    engine: "LLMEngine", prompt: Any, params: "SamplingParams", interruption: Interruption | None = None
) -> Iterator[str]:
    """Yields the completion's text as it grows; aborts it when interrupted or when the caller stops reading.

    `params.output_kind` must be DELTA. Raises ValueError for a prompt that does not fit, EngineDeadError.
    """
    request_id = f"text-{next(_request_numbers)}"
    engine.add_request(request_id, prompt, params)
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                yield output.outputs[0].text
            if interruption is not None and interruption.requested:
                return
    finally:
        if engine.has_unfinished_requests():
            engine.abort_request([request_id])
