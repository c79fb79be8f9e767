"""JSON answers, and reading JSON requests."""

import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError, ErrorStyle

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
NO_LOGPROB = -9999.0
"""What stands for a log-probability of minus infinity, which JSON cannot say."""


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encoder.encode(body), status, dict(headers or {}), media_type="application/json")


def error_response(error: ApiError, style: ErrorStyle) -> Response:
    return json_response(error.body(style), error.status_for(style), error.headers)


def encode(body: object) -> bytes:
    """One line of JSON; non-ASCII characters as they are."""
    return _encoder.encode(body)


def json_float(value: float) -> float:
    return value if math.isfinite(value) else NO_LOGPROB


async def read_body(request: Request, kind: type[T]) -> T:
    """The body as a `kind`. Numbers and booleans may come as text, as many command lines send them.

    Raises ApiError for another content type, and what msgspec raises for what is no `kind`.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type and content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(f"the content type is {content_type!r}; send JSON with 'Content-Type: application/json'")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError("compressed bodies are not read", 415, code="unsupported_content_encoding")
    body = await request.body()
    if body.lstrip()[:1] != b"{":
        try:
            msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
        raise ApiError("the body must be a JSON object")
    return msgspec.json.decode(body, type=kind, strict=False)
