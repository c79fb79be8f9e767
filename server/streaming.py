"""One completion, piece by piece, from a sync engine: what `generate` and `chat` print. Knows how to be interrupted.
Counts tokens and time."""

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

if TYPE_CHECKING:
    from ..engine.llm_engine import LLMEngine
    from ..engine.outputs.request_output import RequestOutput
    from ..protocol.params import SamplingParams

T = TypeVar("T")

_request_numbers = itertools.count()


class _Stopped(KeyboardInterrupt):
    """Ctrl-C while something waited that is to end at once."""


class Interruption:
    """While entered, Ctrl-C only sets `requested`; one more before it is taken raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._ends_waiting = False

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

    def wait(self, blocking: Callable[[], T]) -> T | None:
        """What `blocking` returns; None, at once, where Ctrl-C sets `requested` meanwhile or has set it before."""
        try:
            try:
                self._ends_waiting = True
                return None if self.requested else blocking()
            finally:
                self._ends_waiting = False
        except _Stopped:
            self._ends_waiting = False
            return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._ends_waiting:
            raise _Stopped


@dataclass(slots=True)
class Statistics:
    """Tokens and seconds, summed over the completions of a command."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_timed_tokens: int = 0  # those after a completion's first
    first_seconds: float = 0.0  # until the first token: mostly the prompt's computation
    later_seconds: float = 0.0

    def add(self, output: "RequestOutput", seconds: float, is_first: bool) -> None:
        """Counts one delta of a completion, which took so many seconds."""
        num_tokens = len(output.outputs[0].token_ids)
        self.num_tokens += num_tokens
        if is_first:
            self.num_prompt_tokens += len(output.prompt_token_ids or ())
            self.first_seconds += seconds
        else:
            self.num_timed_tokens += num_tokens
            self.later_seconds += seconds

    def __str__(self) -> str:
        text = f"{self.num_prompt_tokens} prompt tokens, first token after {self.first_seconds:.2f} s"
        text += f"; {self.num_tokens} tokens"
        if self.num_timed_tokens and self.later_seconds > 0:
            text += f", {self.num_timed_tokens / self.later_seconds:.1f} tokens/s"
        return text


def stream_text(
    engine: "LLMEngine",
    prompt: Any,
    params: "SamplingParams",
    interruption: Interruption | None = None,
    statistics: Statistics | None = None,
) -> Iterator[str]:
    """Yields the completion's text as it grows; aborts it when interrupted or when the caller stops reading.

    Adds to `statistics`. `params.output_kind` must be DELTA. Raises ValueError for a prompt that does not fit,
    EngineDeadError.
    """
    statistics = Statistics() if statistics is None else statistics
    request_id = f"text-{next(_request_numbers)}"
    last, is_first = time.perf_counter(), True
    engine.add_request(request_id, prompt, params)
    try:
        while engine.has_unfinished_requests():
            for output in cast(list["RequestOutput"], engine.step()):
                now = time.perf_counter()
                statistics.add(output, now - last, is_first)
                last, is_first = now, False
                yield output.outputs[0].text
            if interruption is not None and interruption.requested:
                return
    finally:
        if engine.has_unfinished_requests():
            engine.abort_request([request_id])
