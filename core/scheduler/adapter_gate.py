"""Which waiting requests may enter the batch for the sake of their LoRA adapters. Owned by `Scheduler`."""

from .request import NO_ROW, Request, RequestStatus
from .request_table import RequestTable


class AdapterGate:
    """Holds those that run to `max_loras` different adapters. A request whose adapter is one too many is set aside, and
    others overtake it; requests without an adapter always may.

    Nobody starves: once `patience` requests with adapters have overtaken the one that has waited longest, those behind
    it wait until it enters, which it does as soon as one of the running adapters has no request left.
    """

    def __init__(self, table: RequestTable, max_loras: int, patience: int) -> None:
        self._table = table
        self._max_loras = max_loras
        self._patience = patience
        self._running: set[str] = set()  # digests
        self._longest: Request | None = None  # of those set aside, the first in order
        self._num_overtaking = 0

    def open(self) -> None:
        """To be called before requests of this step enter."""
        running = {request.adapter.digest for request in self._table.running.values() if request.adapter is not None}
        longest = self._longest
        has_left = longest is None or longest.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if has_left:
            self._longest, self._num_overtaking = None, 0
        if has_left or running != self._running:
            self._table.waiting.restore()
            self._table.preempted.restore()
        self._running = running

    def names(self, running: bool) -> list[str]:
        """Of the adapters of the requests that run, or of those that do not."""
        requests = [each for each in self._table.requests.values() if (each.row != NO_ROW) is running]
        return sorted({each.adapter.request.lora_name for each in requests if each.adapter is not None})

    def admits(self, request: Request) -> bool:
        if request.adapter is None:
            return True
        order_key, longest = self._table.order_key, self._longest
        is_behind = longest is not None and order_key(longest) < order_key(request)
        fits = request.adapter.digest in self._running or len(self._running) < self._max_loras
        if fits and not (is_behind and self._num_overtaking >= self._patience):
            return True
        if not fits and not is_behind and request is not longest:
            self._longest, self._num_overtaking = request, 0
        return False

    def entered(self, request: Request) -> None:
        if request.adapter is None:
            return
        self._running.add(request.adapter.digest)
        longest = self._longest
        if longest is not None and self._table.order_key(longest) < self._table.order_key(request):
            self._num_overtaking += 1
