"""Which requests there are and where each of them stands. Owned by `Scheduler`, which decides when a request moves."""

import heapq
import itertools

import numpy as np

from ...protocol.outputs import EventType
from .request import NO_ROW, Request, RequestStatus
from .request_queue import Policy, RequestQueue, order_key
from .steady_rows import SteadyRows


class RequestTable:
    """A live request is in `requests` and in exactly one of: `running`, `waiting`, `preempted`, `compiling` (its
    grammar is not ready), `idle_sessions` (its session is open and has no prompt to go on with).

    Each transition is one method, which sets the request's status too. A running request has a row of the batch to
    itself: the lowest that is free when it starts.
    """

    def __init__(self, policy: Policy, max_num_seqs: int, block_size: int, log_events: bool) -> None:
        self.order_key = order_key(policy)
        self.requests: dict[str, Request] = {}
        self.running: dict[int, Request] = {}  # by row of the batch, in the order in which they started
        self.steady = SteadyRows(max_num_seqs, block_size)  # of the running ones
        self.waiting = RequestQueue(self.order_key)
        self.preempted = RequestQueue(self.order_key)
        self.compiling: dict[str, Request] = {}
        self.idle_sessions: dict[str, Request] = {}
        self._log_events = log_events
        self._arrivals = itertools.count()
        self.removed: dict[int, Request] = {}  # by row: left the batch; the runner is told with the next step
        self._free_rows = list(range(max_num_seqs))  # a heap
        self._unreported: list[Request] = []  # finished outside of a step; reported with the next step's outputs

    def add(self, request: Request) -> None:
        """New: to the queue."""
        self.requests[request.request_id] = request
        self._record(request, EventType.QUEUED)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """New, or an idle session that has prompt again: behind everything that came before."""
        self.idle_sessions.pop(request.request_id, None)
        request.arrival_order = next(self._arrivals)
        if request.use_structured_output:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self.compiling[request.request_id] = request
        else:
            request.status = RequestStatus.WAITING
            self.waiting.add(request)

    def grammar_ready(self, request: Request) -> None:
        """Compiling: to the queue, in the place of its arrival."""
        del self.compiling[request.request_id]
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def start(self, request: Request) -> None:
        """Waiting or preempted: into the batch."""
        queue = self.preempted if request.status is RequestStatus.PREEMPTED else self.waiting
        queue.remove(request)
        request.status = RequestStatus.RUNNING
        request.row = heapq.heappop(self._free_rows)
        self.running[request.row] = request
        self._record(request, EventType.SCHEDULED)

    def set_aside(self, request: Request) -> None:
        """Waiting or preempted: others may go first for now."""
        queue = self.preempted if request.status is RequestStatus.PREEMPTED else self.waiting
        queue.set_aside(request)

    def preempt(self, request: Request) -> None:
        """Running: out of the batch, until it has its turn again."""
        self._leave_batch(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._record(request, EventType.PREEMPTED)
        self.preempted.add(request)

    def park(self, request: Request) -> None:
        """Running, a session whose prompt so far is answered: out of the batch, until there is more prompt."""
        self._leave_batch(request)
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        self.idle_sessions[request.request_id] = request

    def finish(self, request: Request, status: RequestStatus) -> None:
        """Wherever it stands: forgotten."""
        request_id = request.request_id
        del self.requests[request_id]
        self._leave_batch(request)
        self.waiting.remove(request)
        self.preempted.remove(request)
        self.compiling.pop(request_id, None)
        self.idle_sessions.pop(request_id, None)
        request.status = status

    def finish_unseen(self, request: Request, status: RequestStatus, stop_reason: str | None) -> None:
        """Finished while no step computes it: reported with the next step's outputs."""
        self.finish(request, status)
        request.stop_reason = stop_reason
        self._unreported.append(request)

    def running_rows(self) -> np.ndarray:
        """[num_running] int64, in the order in which they started."""
        return np.fromiter(self.running, np.int64, len(self.running))

    def take_removed(self) -> list[int]:
        """The rows that requests have left since the last call."""
        removed, self.removed = list(self.removed), {}
        return removed

    def take_finished_unseen(self) -> list[Request]:
        """Those of `finish_unseen` since the last call."""
        finished, self._unreported = self._unreported, []
        return finished

    @property
    def has_news(self) -> bool:
        """Whether runner or shell have yet to be told of something."""
        return bool(self.removed or self._unreported)

    def _leave_batch(self, request: Request) -> None:
        request.leave_steady()
        row, request.row = request.row, NO_ROW
        if self.running.pop(row, None) is not None:
            self.removed[row] = request
            heapq.heappush(self._free_rows, row)

    def _record(self, request: Request, event_type: EventType) -> None:
        if self._log_events:
            request.record_event(event_type)
