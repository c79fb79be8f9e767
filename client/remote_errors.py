"""Exceptions that crossed the bridge as names and texts, made into exceptions again."""

import builtins
from typing import Any

from ..protocol.errors import EngineDeadError
from ..protocol.outputs import UtilityOutput


def rebuild_exception(error_type: str, message: str, note: str | None = None) -> Exception:
    """A built-in exception of the type named, so that a ValueError in the core is one here; else a RuntimeError."""
    if error_type == EngineDeadError.__name__:
        return EngineDeadError(message)
    exception_class = getattr(builtins, error_type, None)
    error: Exception
    try:
        known = isinstance(exception_class, type) and issubclass(exception_class, Exception)
        error = exception_class(message) if known else RuntimeError(f"{error_type}: {message}")  # type: ignore[misc]
    except TypeError:  # such as UnicodeDecodeError, which wants more than a message
        error = RuntimeError(f"{error_type}: {message}")
    if note is not None:
        error.add_note(note)
    return error


def utility_result(answer: UtilityOutput, method: str) -> Any:
    """The call's result. Raises what the call raised."""
    if answer.failure_message is not None:
        raise rebuild_exception(answer.failure_type, answer.failure_message, f"In the engine core, in {method}()")
    return answer.result
