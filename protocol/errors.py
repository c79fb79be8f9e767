"""The exceptions a caller can meet, all of them raised in the user's process; and what is made of those that code of
the user's raises inside the engine, which may be of any kind.
"""

import signal
from contextlib import ContextDecorator


class EngineDeadError(Exception):
    """The engine core is gone: nothing in flight will finish and nothing new is accepted.

    `cause` is what the core said of it, such as a traceback, or how its process ended; None where neither is known.
    """

    def __init__(self, cause: str | None = None) -> None:
        message = "The engine core has died; see the log or the cause for the reason."
        super().__init__(f"{message} Cause: {cause}" if cause else message)
        self.cause = cause


class EngineGenerateError(Exception):
    """One request failed inside `generate()`; the engine and every other request go on."""


class ProtocolError(Exception):
    """A frame that does not decode to the message expected: truncated, oversized, of another shape or type."""


class VLLMValidationError(ValueError):
    """A parameter outside its legal range. `parameter` names the field, `value` is what was given."""

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


def text_of(error: BaseException) -> str:
    """`str(error)`, also of an exception that cannot be shown, and fit to be sent."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except BaseException as failure:
        return f"(its str() raises {type(failure).__name__})"


def raised_in(where: str, error: BaseException) -> str:
    """One line on an exception that code of the user's raised, such as a method of theirs."""
    return f"{where} raised {type(error).__name__}: {text_of(error)}"


def may_be_ctrl_c(error: BaseException) -> bool:
    """Whether this may be the user's wish to stop, and not one call's error. In a core's process it never is."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def as_error_of(where: str, error: BaseException) -> Exception:
    """`error` itself where callers can be expected to deal with it, else a RuntimeError that names it and `where`: what
    would end a task, a thread or a loop, or cannot even be shown, is an error of the call it was raised in.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        try:
            str(error), repr(error)
        except BaseException:
            pass
        else:
            return error
    return RuntimeError(raised_in(where, error))


class errors_of(ContextDecorator):  # noqa: N801
    """Around a call of the user's code, also as a decorator: makes `as_error_of(where, ...)` of whatever it raises."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is None or may_be_ctrl_c(error):
            return
        call_error = as_error_of(self._where, error)
        if call_error is not error:
            raise call_error from error
