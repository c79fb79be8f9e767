"""Server-sent events as an ASGI response. The head waits for the first event, so that what goes wrong before it has a
real status; whoever hangs up, at any moment, ends the generator.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, ErrorStyle, as_api_error
from .hang_up import hung_up
from .responses import encode, error_response

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(body: bytes, name: str | None = None) -> bytes:
    """One event of one line of JSON."""
    return b"data: " + body + b"\n\n" if name is None else b"event: %s\ndata: %s\n\n" % (name.encode(), body)


class ChunkFrame:
    """The chunks of one stream of OpenAI's: what they all share is encoded once, ahead of the first."""

    def __init__(self, shared: Mapping[str, object], null_usage: bool) -> None:
        """`shared` is a chunk whose choices are []. `null_usage`: every chunk says that its usage is null."""
        if null_usage:
            shared = {**shared, "usage": None}
        head, _, tail = encode(shared).partition(b'"choices":[]')  # no text holds that: its quotes are escaped
        self._head = b"data: " + head + b'"choices":['
        self._tail = b"]" + tail.removesuffix(b"}")

    def event(self, choice: object, extra: Mapping[str, object] | None = None) -> bytes:
        """A chunk of one choice, with the fields of `extra` beside it."""
        if not extra:
            return b"%s%s%s}\n\n" % (self._head, encode(choice), self._tail)
        return b"%s%s%s,%s\n\n" % (self._head, encode(choice), self._tail, encode(extra)[1:])


class EventStream(Response):
    """`events` yields whole events, one or several at a time. `error_event` spells an error that comes after the head.

    `ping_interval`: seconds of silence after which a comment is sent, 0: none. The first of them fixes the status.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        error_event: Callable[[ApiError], bytes],
        request_id: str,
        style: ErrorStyle = "openai",
        ping_interval: float = 0.0,
        on_error: Callable[[], None] | None = None,
    ) -> None:
        self.events = events
        self.error_event = error_event
        self.request_id = request_id
        self.style = style
        self.ping_interval = ping_interval
        self.on_error = on_error
        self.background = None
        self._pending: asyncio.Task[bytes | None] | None = None  # the next event, while pings fill the silence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(scope, receive, send))
        leaving = asyncio.create_task(hung_up(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self.events.aclose()
        if not sending.cancelled() and (error := sending.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            while True:
                chunk = await self._next_event()
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                if chunk is None:
                    break
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (asyncio.CancelledError, OSError):
            raise
        except Exception as cause:
            error = as_api_error(cause, self.request_id)
            if self.on_error is not None:
                self.on_error()
            if not started:
                await error_response(error, self.style)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self.error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next_event(self) -> bytes | None:
        """The next event, a ping where it is late, None at the end."""
        if not self.ping_interval:
            return await anext(self.events, None)
        pending = self._pending or asyncio.create_task(self._coming())
        self._pending = pending
        try:
            await asyncio.wait({pending}, timeout=self.ping_interval)
        except asyncio.CancelledError:
            pending.cancel()
            raise
        if not pending.done():
            return PING
        self._pending = None
        return pending.result()

    async def _coming(self) -> bytes | None:
        return await anext(self.events, None)
