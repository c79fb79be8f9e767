"""What every request passes on its way in, as one plain ASGI middleware: id, key, size limits, counts, the log line."""

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, ErrorStyle
from .generation import request_id_of
from .page import FILES as PAGE_FILES
from .responses import error_response
from .server import Server

logger = logging.getLogger("corespan.server")

MAX_HEADERS = 256
MAX_HEADER_BYTES = 64 * 1024
MAX_DISCARDED_BYTES = 64 * 2**20
OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/version", "/metrics", "/metrics/", *PAGE_FILES})
"""What needs no key: probes, figures, and the page, which asks for one."""
UNCOUNTED_PATHS = frozenset({"/health", "/ping", "/live", "/version", "/metrics", "/metrics/", "/load"})


class Keys:
    """The API keys, as digests; a given key is compared with all of them, in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether `Authorization: Bearer` or `x-api-key` holds one of them."""
        matched = False
        for given in _given_keys(headers):
            digest = hashlib.sha256(given).digest()
            for known in self._digests:
                matched |= hmac.compare_digest(digest, known)
        return matched


def _given_keys(headers: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    given = []
    for name, value in headers:
        if name == b"x-api-key":
            given.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                given.append(key.strip())
    return given


class Gate:
    """Wraps the application. `scope["state"]["request_id"]` is set for whoever answers."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app = app
        self.server = server
        self.keys = Keys(server.options.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["root_path"] = self.server.options.root_path.rstrip("/")  # a proxy may strip it from paths, or not
        path = route_path(scope)
        counted = path not in UNCOUNTED_PATHS
        exchange = _Exchange(request_id_of(Request(scope)), send)
        self.server.num_requests += counted
        started = time.perf_counter()
        try:
            error = self._refusal(scope, path)
            if error is not None:
                if error.status == 413:
                    await _discard(receive)
                await error_response(error, style_of(path, self.server))(scope, receive, exchange.send)
            else:
                limited = _LimitedBody(receive, self.server.options.max_request_bytes)
                await self.app(scope, limited.receive, exchange.send)
        finally:
            self.server.num_requests -= counted
            if counted:
                self._record(scope, exchange.status, time.perf_counter() - started)

    def _refusal(self, scope: Scope, path: str) -> ApiError | None:
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            return ApiError("too many or too large headers", 431)
        if self.keys and path not in OPEN_PATHS and scope["method"] != "OPTIONS" and not self.keys.match(headers):
            return ApiError(
                "no valid API key: send it as 'Authorization: Bearer KEY'",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self.server.options.max_request_bytes:
            return too_large(self.server.options.max_request_bytes)
        return None

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        handler = getattr(route, "path", "unmatched")
        self.server.metrics.count(scope["method"], handler, status, seconds)
        if not self.server.options.disable_uvicorn_access_log:
            client = scope.get("client") or ("unix", 0)
            logger.info('%s:%s "%s %s" %d %.3fs', *client, scope["method"], handler, status, seconds)


def too_large(limit: int) -> ApiError:
    return ApiError(
        f"the body is larger than {limit} bytes", 413, code="request_too_large", headers={"Connection": "close"}
    )


def style_of(path: str, server: Server) -> ErrorStyle:
    return "anthropic" if f"{path}/".startswith("/v1/messages/") else server.options.error_style


def route_path(scope: Scope) -> str:
    """The path below the root path."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


class _Exchange:
    """Notes the status of an answer, and gives it the request's id as a header."""

    def __init__(self, request_id: str, send: Send) -> None:
        self.status = 499  # until an answer begins: the client is gone
        self._header = (b"x-request-id", request_id.encode())
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), self._header]
        await self._send(message)


class _LimitedBody:
    """Counts a body that comes without its length. Raises ApiError beyond the limit."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._size = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._limit:
                if message.get("more_body"):
                    await _discard(self._receive)
                raise too_large(self._limit)
        return message


async def _discard(receive: Receive) -> None:
    """Reads on, within bounds: a connection that is closed on unread bytes is reset, and the answer lost with it."""
    size = 0
    while size <= MAX_DISCARDED_BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            return
