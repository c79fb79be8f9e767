"""The requests that wait for their turn, in the order of the scheduling policy. Owned by the scheduler."""

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Literal

from .request import Request

Policy = Literal["fcfs", "priority"]
OrderKey = tuple[Any, ...]


def order_key(policy: Policy) -> Callable[[Request], OrderKey]:
    """What requests are sorted by, smaller first: arrival, or priority and then arrival."""
    if policy == "priority":
        return lambda request: (request.priority, request.arrival_time, request.arrival_order)
    return lambda request: (request.arrival_order,)


class RequestQueue:
    """A heap of requests. One that comes back (preempted) finds its old place by its key.

    Removal leaves a dead entry behind, which is dropped when it surfaces or when most entries are dead.
    """

    def __init__(self, key: Callable[[Request], OrderKey]) -> None:
        self._key = key
        self._heap: list[tuple[OrderKey, Request]] = []
        self._live: dict[str, tuple[OrderKey, Request]] = {}
        self._aside: list[tuple[OrderKey, Request]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        """The requests, in the order in which `pop` would give them."""
        return (request for _, request in sorted(self._live.values()))

    def add(self, request: Request) -> None:
        entry = (self._key(request), request)
        self._live[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request | None:
        """The request whose turn is next."""
        while self._heap:
            entry = self._heap[0]
            if self._live.get(entry[1].request_id) is entry:
                return entry[1]
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take the request whose turn is next. Raises IndexError when none waits."""
        request = self.peek()
        if request is None:
            raise IndexError("no request is waiting")
        heapq.heappop(self._heap)
        del self._live[request.request_id]
        return request

    def set_aside(self, request: Request) -> None:
        """Let those behind it have their turn before this one, which `peek` has just given, until `restore`."""
        self._aside.append(heapq.heappop(self._heap))

    def restore(self) -> None:
        """Those set aside are back in their places."""
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()

    def remove(self, request: Request) -> bool:
        """Take this request out; False when it does not wait here."""
        if self._live.pop(request.request_id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            self._aside.clear()
            heapq.heapify(self._heap)
        return True
