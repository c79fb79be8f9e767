"""The asyncio task that brings the core's outputs to the streams. Started by `AsyncLLM`, to which it holds no
reference, so that an engine that is dropped goes away although the task runs.
"""

import asyncio
import logging
import threading

from ..client.base import AsyncEngineCoreClient
from ..protocol import envs
from ..protocol.errors import EngineDeadError, as_error_of
from ..protocol.outputs import EngineCoreOutputs, SchedulerStats
from .metrics.manager import StatLoggerManager
from .metrics.stats import IterationStats
from .outputs.output_processor import OutputProcessor

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
        self._handling = False
        self._start_lock = threading.Lock()  # of two loops at once, one gets the engine

    def ensure_running(self) -> None:
        """Starts the task in the running loop unless it is there. Raises RuntimeError while another loop has it."""
        loop = asyncio.get_running_loop()
        with self._start_lock:
            self.require_own_loop()
            if self._task is None or self._task.done() or self._task.get_loop() is not loop:
                self._task = loop.create_task(self._run(), name="corespan-output-handler")

    def require_own_loop(self) -> None:
        """Raises RuntimeError while another event loop, which still runs, uses the engine."""
        if self._task is None or self._task.done():
            return
        own_loop = self._task.get_loop()
        if own_loop is not asyncio.get_running_loop() and own_loop.is_running():
            raise RuntimeError("the engine is in use in another event loop, which is still running")

    async def catch_up(self) -> None:
        """Returns when all that has come from the core is with the streams, and whoever waited for it has had a turn.

        The task waits for nothing but its turn while there is something to handle, so giving it turns is enough.
        """
        task = self._task
        while task is not None and not task.done() and (self._handling or self._engine_core.has_output):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _run(self) -> None:
        try:
            while True:
                outputs = await self._engine_core.get_output_async()
                self._handling = True
                try:
                    await self._handle(outputs)
                finally:
                    self._handling = False
        except (asyncio.CancelledError, GeneratorExit):
            raise  # the loop ends
        except BaseException as failure:
            error = as_error_of("the output handler", failure)
            if not isinstance(error, EngineDeadError):
                logger.exception("The output handler failed")
            self.failure = error
            iteration_stats = IterationStats() if self._logger_manager is not None else None
            self._output_processor.propagate_error(error, iteration_stats)
            if self._logger_manager is not None:
                self._logger_manager.record(SchedulerStats(), iteration_stats)  # nothing runs any more

    async def _handle(self, outputs: EngineCoreOutputs) -> None:
        """In slices, between which other tasks get a turn."""
        tokens = list(zip(outputs.handles, outputs.token_ids, strict=True))
        longest = max(len(outputs.outputs), len(tokens))
        iteration_stats = IterationStats() if self._logger_manager is not None and longest else None
        for start in range(0, longest, self._chunk_size):
            if start:
                await asyncio.sleep(0)
            part = slice(start, start + self._chunk_size)
            processed = self._output_processor.process_outputs(
                outputs.outputs[part], outputs.timestamp, iteration_stats, tokens[part]
            )
            await self._engine_core.abort_requests_async(processed.reqs_to_abort)
        if self._logger_manager is not None:
            self._logger_manager.record(outputs.scheduler_stats, iteration_stats)
            self._logger_manager.log_if_due()
