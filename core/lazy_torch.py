"""torch, imported when something of it is first used: that takes two seconds, and the native path does without it."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch as torch
else:

    class _LazyTorch:
        def __getattr__(self, name: str) -> Any:
            return getattr(load_torch(), name)

    torch = _LazyTorch()

thread_limit: int | None = None
"""For the kernels and for torch, where neither the environment nor a torch that was loaded before says how many."""


def limit_threads(count: int) -> None:
    global thread_limit
    thread_limit = count


def load_torch() -> ModuleType:
    is_first = "torch" not in sys.modules
    import torch

    if is_first and thread_limit is not None:
        torch.set_num_threads(thread_limit)
    return torch


P = ParamSpec("P")
R = TypeVar("R")


def inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """As `torch.inference_mode()`, which torch is imported for when the function is first called."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode():
            return function(*args, **kwargs)

    return wrapped
