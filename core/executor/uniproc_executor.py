"""The executor whose one worker lives in the core's own process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...protocol.config import VllmConfig
from ..scheduler.runner_messages import ModelRunnerOutput, SchedulerOutput
from ..worker.worker import Worker
from .abstract import Executor


class UniProcExecutor(Executor):
    """Calls go straight to `driver_worker`; timeouts do not apply."""

    rpc_methods = Worker.RPC_METHODS

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.driver_worker: Worker | None = Worker(vllm_config)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        worker = self._worker()
        if callable(method):
            return [method(worker, *args, **(kwargs or {}))]
        bound = getattr(worker, method, None)
        if method.startswith("_") or not callable(bound):
            raise NotImplementedError(f"the worker has no method {method!r}")
        return [bound(*args, **(kwargs or {}))]

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker().execute_model(scheduler_output)

    def shutdown(self) -> None:
        self.driver_worker = None

    def _worker(self) -> Worker:
        if self.driver_worker is None:
            raise RuntimeError("the executor has been shut down")
        return self.driver_worker
