"""torch, imported when something of it is first used: that takes two seconds, and the native path does without it."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch as torch
else:

    class _LazyTorch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _LazyTorch()

P = ParamSpec("P")
R = TypeVar("R")


def inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """As `torch.inference_mode()`, which torch is imported for when the function is first called."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode():
            return function(*args, **kwargs)

    return wrapped
