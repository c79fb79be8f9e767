"""The blocking client for a core in a process of its own."""

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from ..protocol.config import VllmConfig
from ..protocol.errors import EngineDeadError
from ..protocol.outputs import EngineCoreOutputs, UtilityOutput
from ..protocol.requests import EngineCoreRequest, UtilityRequest
from .base import SyncEngineCoreClient
from .failures import utility_result
from .link import CoreLink
from .supervisor import Supervisor

R = TypeVar("R")


class SyncMPClient(SyncEngineCoreClient):
    """Usable from several threads. There is no reader thread: of the threads that wait, one reads the socket and sorts
    what comes for all of them, so a lone caller gets its answer without a change of thread.
    """

    def __init__(self, vllm_config: VllmConfig, executor_class: str, log_stats: bool) -> None:
        start = functools.partial(CoreLink, vllm_config, executor_class, log_stats)
        self._supervisor = Supervisor(start, vllm_config, vllm_config.parallel_config.engine_restart)
        self._finalizer = weakref.finalize(self, self._supervisor.close)
        self.vllm_config = self._supervisor.link.vllm_config
        self._call_ids = itertools.count()
        self._state = threading.Condition()  # guards the three below
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._answers: dict[int, UtilityOutput | None] = {}  # of the calls in flight
        self._someone_reads = False

    def get_output(self) -> EngineCoreOutputs:
        return self._wait_for(lambda: self._outputs.popleft() if self._outputs else None)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._supervisor.add(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids and not self.engine_dead:
            self._supervisor.abort(request_ids)

    def call_utility(self, method: str, *args: object) -> Any:
        call_id = next(self._call_ids)
        self._answers[call_id] = None
        link = self._living_link()
        try:
            self._supervisor.call(link, UtilityRequest(0, call_id, method, list(args)))
            return utility_result(self._wait_for(lambda: self._answers[call_id], link))
        finally:
            del self._answers[call_id]

    def _living_link(self) -> CoreLink:
        if self._supervisor.link.check_death():
            self._revive()
        return self._supervisor.link

    @property
    def engine_dead(self) -> bool:
        return self._supervisor.dead

    def dead_error(self) -> EngineDeadError:
        return self._supervisor.dead_error()

    @property
    def num_held_requests(self) -> int:
        return self._supervisor.num_held

    def shutdown(self, timeout: float | None = None) -> None:
        """What the core finished meanwhile is still handed out by `get_output`."""
        last_outputs = self._supervisor.close(self._drain_seconds(timeout))
        self._finalizer.detach()
        with self._state:
            for outputs in last_outputs:
                self._sort(outputs)

    def _wait_for(self, take: Callable[[], R | None], link: CoreLink | None = None) -> R:
        """What `take` returns, as soon as that is not None. Raises EngineDeadError when it cannot come any more: the
        core is dead for good or, if it must come from a certain `link`, that one is.
        """
        while True:
            with self._state:
                while True:
                    taken = take()
                    if taken is not None:
                        return taken
                    if link is not None and link.dead_cause is not None:
                        raise link.dead_error()
                    if self._supervisor.link.dead_cause is not None and not self._supervisor.may_restart:
                        raise self.dead_error()
                    if not self._someone_reads:
                        break
                    self._state.wait()
                self._someone_reads = True
            try:
                self._read_or_revive()
            finally:
                with self._state:
                    self._someone_reads = False
                    self._state.notify_all()

    def _read_or_revive(self) -> None:
        """Waits for a message and sorts it. A dead core is replaced by whoever comes next: until then, those who wait
        for its answers have been told.
        """
        link = self._supervisor.link
        if link.dead_cause is not None:
            self._revive()
            return
        link.wait()
        received = link.receive_nowait()
        if received is not None:
            self._supervisor.record(received)
            with self._state:
                self._sort(received)

    def _revive(self) -> None:
        given_up = self._supervisor.revive()
        if given_up.outputs:
            with self._state:
                self._outputs.append(given_up)

    def _sort(self, received: EngineCoreOutputs) -> None:
        answer = received.utility_output
        if answer is not None:
            if answer.call_id in self._answers:
                self._answers[answer.call_id] = answer
        else:
            self._outputs.append(received)
