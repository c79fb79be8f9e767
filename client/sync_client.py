"""The blocking client for a core in a process of its own."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from ..protocol.errors import EngineDeadError
from ..protocol.outputs import EngineCoreOutputs, UtilityOutput
from ..protocol.requests import EngineCoreRequest, UtilityRequest
from .base import SyncEngineCoreClient
from .connection import Connection
from .remote_errors import utility_result

R = TypeVar("R")


class SyncMPClient(SyncEngineCoreClient):
    """Usable from several threads. There is no reader thread: of the threads that wait, one reads the socket and
    dispatches what comes for all of them, so a lone caller gets its answer without a change of thread.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._finalizer = weakref.finalize(self, connection.close)
        self.vllm_config = connection.vllm_config
        self._call_ids = itertools.count()
        self._state = threading.Condition()  # guards the three below
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._answers: dict[int, UtilityOutput | None] = {}  # of the calls in flight
        self._someone_reads = False

    def get_output(self) -> EngineCoreOutputs:
        return self._wait_for(lambda: self._outputs.popleft() if self._outputs else None)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._connection.add(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids and not self.engine_dead:
            self._connection.abort(request_ids)

    def call_utility(self, method: str, *args: object) -> Any:
        call_id = next(self._call_ids)
        self._answers[call_id] = None
        try:
            self._connection.call(UtilityRequest(0, call_id, method, list(args)))
            return utility_result(self._wait_for(lambda: self._answers[call_id]), method)
        finally:
            del self._answers[call_id]

    @property
    def engine_dead(self) -> bool:
        return self._connection.dead

    def dead_error(self) -> EngineDeadError:
        return self._connection.dead_error()

    @property
    def num_held_requests(self) -> int:
        return self._connection.num_held

    def shutdown(self, timeout: float | None = None) -> None:
        """What the core finished meanwhile is still handed out by `get_output`."""
        self._connection.close(self._drain_seconds(timeout))
        self._finalizer.detach()

    def _wait_for(self, take: Callable[[], R | None]) -> R:
        """What `take` returns, as soon as that is not None. Raises EngineDeadError when it cannot come any more."""
        while True:
            with self._state:
                while True:
                    taken = take()
                    if taken is not None:
                        return taken
                    if not self._someone_reads:
                        break
                    self._state.wait()
                self._someone_reads = True
            received = None
            try:
                received = self._receive()
            finally:
                with self._state:
                    if received is not None:
                        self._dispatch(received)
                    self._someone_reads = False
                    self._state.notify_all()

    def _receive(self) -> EngineCoreOutputs | None:
        if self._connection.drained:
            raise self.dead_error()
        self._connection.wait()
        return self._connection.receive_nowait()

    def _dispatch(self, received: EngineCoreOutputs) -> None:
        answer = received.utility_output
        if answer is not None:
            if answer.call_id in self._answers:
                self._answers[answer.call_id] = answer
        else:
            self._outputs.append(received)
