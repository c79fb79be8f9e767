"""Every error a client can meet: `ApiError`, what other exceptions become, and how each API spells them."""

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any, Literal

import jinja2
import msgspec

from ...protocol.errors import EngineDeadError, EngineGenerateError, VLLMValidationError

logger = logging.getLogger("corespan.server")

ErrorStyle = Literal["openai", "vllm", "anthropic"]

# By status; those that are not here are the caller's mistake below 500, the server's from there.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_VLLM_TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    501: "NotImplementedError",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
RETRY_AFTER_SECONDS = "1"


class ApiError(Exception):
    """An answer other than success. `param` is the dotted name of the field at fault, `code` one of OpenAI's words."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self, style: ErrorStyle) -> dict[str, Any]:
        """The error object as the API in question spells it."""
        if style == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        if style == "vllm":
            kind = _VLLM_TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
            return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}
        kind = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def status_for(self, style: ErrorStyle) -> int:
        """Anthropic's clients know an overloaded server as 529."""
        return 529 if style == "anthropic" and self.status == 503 else self.status


def unavailable(message: str) -> ApiError:
    """503: the same request may succeed a moment later."""
    return ApiError(message, 503, code="service_unavailable", headers={"Retry-After": RETRY_AFTER_SECONDS})


def model_not_found(name: str, known: list[str]) -> ApiError:
    models = ", ".join(map(repr, known))
    return ApiError(
        f"the model {name!r} does not exist; served here: {models}", 404, param="model", code="model_not_found"
    )


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """What a client is told. The causes of 5xx stay in the log: they may hold paths and addresses."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(f"the engine is down (request {request_id})", 500)
    if isinstance(error, VLLMValidationError):
        return _validation_error(error)
    if isinstance(error, msgspec.ValidationError):
        return _schema_error(error)
    if isinstance(error, msgspec.DecodeError):
        return ApiError(f"the body is not valid JSON: {error}", code="invalid_json")
    if isinstance(error, (ValueError, TypeError, OverflowError, jinja2.TemplateError)):
        return ApiError(str(error) or type(error).__name__, code="invalid_value")
    if isinstance(error, RecursionError):
        return ApiError("the body is too deeply nested", code="invalid_value")
    if isinstance(error, EngineGenerateError):
        logger.error("Request %s failed in the engine: %s", request_id, error)
        return ApiError(f"the engine failed on this request ({request_id})", 500, headers={"x-should-retry": "false"})
    if isinstance(error, asyncio.CancelledError):
        return unavailable("the request was cancelled: the server is shutting down")
    logger.error("Request %s failed", request_id, exc_info=error)
    return ApiError(f"internal error (request {request_id})", 500)


def _validation_error(error: VLLMValidationError) -> ApiError:
    if error.parameter in ("input_tokens", "input_text"):
        return ApiError(
            f"this model's maximum context length is exceeded: {error}",
            param="messages",
            code="context_length_exceeded",
        )
    return ApiError(str(error), param=error.parameter, code="invalid_value")


_AT_PATH = re.compile(r"(?P<complaint>.*) - at `(?P<path>[^`]*)`$", re.DOTALL)


def _schema_error(error: msgspec.ValidationError) -> ApiError:
    """msgspec says "... - at `$.messages[0].content`"; clients are told `messages.0.content`."""
    match = _AT_PATH.match(str(error))
    if match is None:
        missing = re.match(r"Object missing required field `([^`]+)`", str(error))
        return ApiError(str(error), param=missing[1] if missing else None, code="invalid_value")
    path = match["path"].removeprefix("$").replace("[", ".").replace("]", "").replace("...", "*").strip(".")
    missing = re.match(r"Object missing required field `([^`]+)`", match["complaint"])
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    return ApiError(
        f"{path}: {match['complaint']}" if path else match["complaint"], param=path or None, code="invalid_value"
    )
