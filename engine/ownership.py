"""Who may use an engine: the process that made it, and there, where calls block, one thread after the other."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..client.fair_lock import FairLock

P = ParamSpec("P")
R = TypeVar("R")


class OwnedByProcess:
    """Every public method and property of a subclass raises RuntimeError in any process but the instance's own.

    A fork inherits the object, but not the threads that it needs, and must not talk on its sockets. An async generator
    is left as it is: what it awaits first is guarded.
    """

    def __init__(self) -> None:
        self._owner_pid = os.getpid()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            if not name.startswith("_"):
                setattr(cls, name, _guarded(member))

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._owner_pid

    def _require_owner(self) -> None:
        if self._is_fork:
            raise RuntimeError(
                f"this {type(self).__name__} belongs to process {self._owner_pid}, and this is its fork "
                f"{os.getpid()}: make one of its own here, after the fork"
            )


def _guarded(member: Any) -> Any:
    """The same member of a class, with a look at the process first."""
    if isinstance(member, property):
        return property(_guarded(member.fget), member.fset, member.fdel, member.__doc__)
    if not inspect.isfunction(member) or inspect.isasyncgenfunction(member):
        return member
    if inspect.iscoroutinefunction(member):

        @functools.wraps(member)
        async def call_async(self: OwnedByProcess, *args: Any, **kwargs: Any) -> Any:
            self._require_owner()
            return await member(self, *args, **kwargs)

        return call_async

    @functools.wraps(member)
    def call(self: OwnedByProcess, *args: Any, **kwargs: Any) -> Any:
        self._require_owner()
        return member(self, *args, **kwargs)

    return call


class _HasTurns(Protocol):
    turns: FairLock


E = TypeVar("E", bound=_HasTurns)


def takes_turns(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Lets one thread after the other into all methods of an engine so decorated."""

    @functools.wraps(method)
    def call(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turns:
            return method(self, *args, **kwargs)

    return call
