"""The asyncio task that brings the core's outputs to the streams. Started by `AsyncLLM`, to which it holds no
reference, so that an engine that is dropped goes away although the task runs.
"""

import asyncio
import logging

from ..client.base import AsyncEngineCoreClient
from ..protocol import envs
from ..protocol.errors import EngineDeadError
from ..protocol.outputs import EngineCoreOutputs, SchedulerStats
from .metrics.loggers import StatLoggerManager
from .metrics.stats import IterationStats
from .output_processor import OutputProcessor

logger = logging.getLogger("corespan.engine")


class OutputHandler:
    """At most one task, in the event loop that uses the engine. `failure`: what ended it for good, None until then."""

    def __init__(
        self,
        engine_core: AsyncEngineCoreClient,
        output_processor: OutputProcessor,
        logger_manager: StatLoggerManager | None,
    ) -> None:
        self.failure: Exception | None = None
        self._engine_core = engine_core
        self._output_processor = output_processor
        self._logger_manager = logger_manager
        self._chunk_size = max(envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE, 1)
        self._task: asyncio.Task[None] | None = None

    def ensure_running(self) -> None:
        """Starts the task in the running loop unless it is there. Raises RuntimeError while another loop has it."""
        loop = asyncio.get_running_loop()
        if self._task is not None and not self._task.done():
            if self._task.get_loop() is loop:
                return
            if self._task.get_loop().is_running():
                raise RuntimeError("the engine is in use in another event loop, which is still running")
        self._task = loop.create_task(self._run(), name="corespan-output-handler")

    async def _run(self) -> None:
        try:
            while True:
                await self._handle(await self._engine_core.get_output_async())
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("The output handler failed")
            self.failure = error
            iteration_stats = IterationStats() if self._logger_manager is not None else None
            self._output_processor.propagate_error(error, iteration_stats)
            if self._logger_manager is not None:
                self._logger_manager.record(SchedulerStats(), iteration_stats)  # nothing runs any more

    async def _handle(self, outputs: EngineCoreOutputs) -> None:
        """In slices, between which other tasks get a turn."""
        iteration_stats = IterationStats() if self._logger_manager is not None and outputs.outputs else None
        for start in range(0, len(outputs.outputs), self._chunk_size):
            if start:
                await asyncio.sleep(0)
            processed = self._output_processor.process_outputs(
                outputs.outputs[start : start + self._chunk_size], outputs.timestamp, iteration_stats
            )
            await self._engine_core.abort_requests_async(processed.reqs_to_abort)
        if self._logger_manager is not None:
            self._logger_manager.record(outputs.scheduler_stats, iteration_stats)
            self._logger_manager.log_if_due()
