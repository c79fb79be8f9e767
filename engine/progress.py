"""Progress bars of `LLM`: tqdm, or whatever the caller makes bars with."""

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .outputs import RequestOutput

T = TypeVar("T")

UseTqdm = bool | Callable[..., Any]
"""Whether to show progress, or what makes the bar in place of tqdm."""


def progress(items: Iterable[T], total: int, use_tqdm: UseTqdm, description: str) -> Iterable[T]:
    """`items`, with a bar that counts them."""
    if not use_tqdm:
        return items
    bar: Iterable[T] = _bar_factory(use_tqdm)(items, total=total, desc=description)
    return bar


class CompletionBar:
    """The bar of finished prompts, with the rates of tokens in and out since the start."""

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        postfix = f"est. speed input: {0:.2f} toks/s, output: {0:.2f} toks/s"
        self._bar = _bar_factory(use_tqdm)(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=postfix)
        self._start = time.perf_counter()
        self._num_input_tokens = 0
        self._num_output_tokens = 0

    def update(self, output: RequestOutput) -> None:
        self._num_input_tokens += len(output.prompt_token_ids or ())
        self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        self._bar.postfix = (
            f"est. speed input: {self._num_input_tokens / elapsed:.2f} toks/s, "
            f"output: {self._num_output_tokens / elapsed:.2f} toks/s"
        )
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


def _bar_factory(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    factory: Callable[..., Any] = tqdm
    return factory
