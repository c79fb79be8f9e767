"""Exceptions of a user's code that are awkward to pass on: they are no errors, or cannot be shown."""

import asyncio


class Unprintable(Exception):
    """Neither `str()` nor `repr()` of it works."""

    def __str__(self) -> str:
        raise SystemExit("in str()")

    def __repr__(self) -> str:
        raise ValueError("in repr()")


class OfTheUsers(BaseException):
    """Derived from what only Python itself should derive from."""


ODD_ERRORS: dict[str, type[BaseException]] = {
    each.__name__: each
    for each in (
        Unprintable,
        OfTheUsers,
        SystemExit,
        GeneratorExit,
        asyncio.CancelledError,
        StopIteration,
        KeyboardInterrupt,
    )
}


def raise_odd(name: str) -> None:
    raise ODD_ERRORS[name](3)
