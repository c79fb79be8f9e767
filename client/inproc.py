"""The client for a core in the same process: calls instead of messages."""

import os
import traceback
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ..protocol.config import VllmConfig
from ..protocol.errors import EngineDeadError, may_be_ctrl_c
from ..protocol.outputs import EngineCoreOutputs
from ..protocol.requests import EngineCoreRequest
from .base import SyncEngineCoreClient
from .cpus import limit_threads
from .fair_lock import FairLock

if TYPE_CHECKING:
    from ..core.engine_core import EngineCore


class InprocClient(SyncEngineCoreClient):
    """`engine_core` is the core itself. A step that fails ends it, as it would end a process. Usable from several
    threads, which take turns.
    """

    def __init__(self, vllm_config: VllmConfig, executor_class: str, log_stats: bool) -> None:
        self._turns = FairLock()
        limit_threads()
        from ..core.engine_core import EngineCore

        self._pending: deque[EngineCoreOutputs] = deque()
        pending = self._pending  # the core must not hold on to the client
        self.engine_core = EngineCore(
            vllm_config, executor_class, log_stats, emit=lambda _, outputs: pending.append(outputs)
        )
        self.vllm_config = self.engine_core.vllm_config
        self._dead_cause: str | None = None
        self._finalizer = weakref.finalize(self, _shut_down, self.engine_core, os.getpid())

    def get_output(self) -> EngineCoreOutputs:
        """What is ready already, else what one step gives; empty outputs when that is nothing."""
        with self._turns:
            self._ensure_alive()
            if not self._pending:
                self._step()
            return self._pending.popleft() if self._pending else EngineCoreOutputs()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Raises ValueError, too, for an id that is in flight."""
        with self._turns:
            self._ensure_alive()
            self.engine_core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        with self._turns:
            if request_ids and not self.engine_dead:
                self.engine_core.abort_requests(request_ids)

    def call_utility(self, method: str, *args: object) -> Any:
        with self._turns:
            self._ensure_alive()
            result = self.engine_core.call_utility(method, args)
            if isinstance(result, Future):
                while not result.done():
                    self._step()
                return result.result()
            return result

    @property
    def engine_dead(self) -> bool:
        return self._dead_cause is not None

    def dead_error(self) -> EngineDeadError:
        return EngineDeadError(self._dead_cause)

    def shutdown(self, timeout: float | None = None) -> None:
        """Requests in flight are dropped, whatever `timeout`: nobody else could take their outputs."""
        self._drain_seconds(timeout)
        with self._turns:
            if not self.engine_dead:
                self._dead_cause = "it was shut down"
            self._finalizer()

    def _ensure_alive(self) -> None:
        if self.engine_dead:
            raise self.dead_error()

    def _step(self) -> None:
        try:
            outputs, _ = self.engine_core.step()
            if not self.engine_core.has_work():
                self.engine_core.run_idle_actions()
        except BaseException as error:
            if may_be_ctrl_c(error):
                raise
            self._dead_cause = traceback.format_exc()
            self._finalizer()
            raise self.dead_error() from error
        self._pending.extend(outputs.values())


def _shut_down(engine_core: "EngineCore", owner_pid: int) -> None:
    """A fork leaves the core alone: it has none of the threads that the core's libraries count on."""
    if os.getpid() == owner_pid:
        engine_core.shutdown()
