"""Responses kept for later requests: bounded in number, in size and in time, each seen by its owner's key alone."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from .errors import ApiError
from .responses import encode

MAX_RESPONSES = 1000
MAX_BYTES = 256 * 2**20
SECONDS_TO_LIVE = 3600.0


@dataclass(eq=False)
class StoredResponse:
    """`items`: all that the response was made from, earlier responses included. `events` are kept in background only.

    `task` runs a background response and is None for any other.
    """

    body: dict[str, Any]
    items: list[dict[str, Any]]
    owner: str
    events: list[dict[str, Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    expires: float = 0.0
    size: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    def add_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.wake()

    def wake(self) -> None:
        """Tells all followers that there is something new."""
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[dict[str, Any], None]:
        """The events with a greater sequence number than `after`, those to come included."""
        position = after + 1
        while True:
            news = self._news
            while position < len(self.events):
                yield self.events[position]
                position += 1
            if not self.running:
                return
            await news.wait()


class ResponseStore:
    """Least recently used responses go first; running ones stay."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: StoredResponse) -> None:
        """Keeps a response, or a new state of it."""
        self._drop(stored.body["id"])
        stored.size = len(encode(stored.body)) + len(encode(stored.items))
        stored.expires = time.monotonic() + SECONDS_TO_LIVE
        self._responses[stored.body["id"]] = stored
        self._bytes += stored.size
        self._trim()

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Raises ApiError (404)."""
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner or (stored.expires < time.monotonic() and not stored.running):
            raise ApiError(f"no response {response_id!r:.100} is stored here", 404, param=param, code="not_found")
        self._responses.move_to_end(response_id)
        return stored

    def delete(self, stored: StoredResponse) -> None:
        if stored.task is not None:
            stored.task.cancel()
        self._drop(stored.body["id"])

    def _drop(self, response_id: str) -> None:
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size

    def _trim(self) -> None:
        now = time.monotonic()
        for response_id, stored in list(self._responses.items()):
            full = len(self._responses) > MAX_RESPONSES or self._bytes > MAX_BYTES
            if not full and stored.expires >= now:
                return
            if not stored.running:
                self._drop(response_id)
