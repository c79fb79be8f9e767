"""Progress bars of `LLM`: tqdm, or whatever the caller makes bars with."""

import functools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..protocol.param_checks import reject_type
from .outputs.output_collector import EngineOutput
from .outputs.pooling_state import PoolingState
from .outputs.request_output import RequestOutput
from .outputs.request_state import RequestState

T = TypeVar("T")

REFRESH_INTERVAL = 0.5  # seconds between two updates of the rates

UseTqdm = bool | Callable[..., Any]
"""Whether to show progress, or what makes the bar in place of tqdm."""


def progress(items: Iterable[T], total: int, use_tqdm: UseTqdm, description: str) -> Iterable[T]:
    """`items`, with a bar that counts them."""
    if not use_tqdm:
        return items
    bar: Iterable[T] = _bar_factory(use_tqdm)(items, total=total, desc=description)
    return bar


class CompletionBar:
    """The bar of finished prompts, with the rates of tokens in and out since the start, also while none finishes."""

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        self._bar = _bar_factory(use_tqdm)(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._start = self._last_shown = time.perf_counter()
        self._num_input_tokens = 0  # of finished prompts
        self._num_output_tokens = 0

    def finish(self, output: EngineOutput) -> None:
        """One more prompt is done."""
        self._num_input_tokens += len(output.prompt_token_ids or ())
        if isinstance(output, RequestOutput):
            self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self._show_rates(self._num_input_tokens, self._num_output_tokens)
        self._bar.update(1)

    def tick(self, running: Iterable[RequestState | PoolingState]) -> None:
        """Brings the rates up to date, twice a second at most, with what the running requests have so far."""
        if time.perf_counter() - self._last_shown < REFRESH_INTERVAL:
            return
        begun = [state for state in running if isinstance(state, RequestState) and state.num_generated]
        num_input_tokens = sum(len(state.request.prompt_token_ids) for state in begun if state.index == 0)
        num_output_tokens = sum(state.num_generated for state in begun)
        self._show_rates(self._num_input_tokens + num_input_tokens, self._num_output_tokens + num_output_tokens)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()

    def _show_rates(self, num_input_tokens: int, num_output_tokens: int) -> None:
        self._last_shown = time.perf_counter()
        elapsed = max(self._last_shown - self._start, 1e-9)
        self._bar.postfix = (
            f"est. speed input: {num_input_tokens / elapsed:.2f} toks/s, "
            f"output: {num_output_tokens / elapsed:.2f} toks/s"
        )


def _bar_factory(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    if use_tqdm is not True:
        reject_type("use_tqdm", use_tqdm, "True, False or what makes a bar")
    from tqdm.auto import tqdm

    if sys.stderr is None or sys.stderr.closed:  # nowhere to draw it
        return functools.partial(tqdm, disable=True)
    factory: Callable[..., Any] = tqdm
    return factory
