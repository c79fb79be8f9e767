"""`LLMEngine`: requests in, outputs out, one `step()` at a time, for callers that may block. `LLM` is built on it."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..client import make_client
from ..client.base import EngineCoreClient, SyncEngineCoreClient
from ..client.fair_lock import FairLock
from ..client.spawn import core_ahead
from ..protocol import envs
from ..protocol.config import VllmConfig
from ..protocol.lora import LoadedAdapter, LoRARequest
from ..protocol.outputs import SchedulerStats
from ..protocol.param_checks import as_seconds
from ..protocol.params import SamplingParams
from ..protocol.pausing import PauseMode
from ..protocol.pooling import PoolingParams
from .engine_args import DEFAULT_EXECUTOR_CLASS, EngineArgs, UsageContext
from .engine_base import EngineBase
from .metrics.loggers import StatLoggerFactory
from .metrics.manager import NO_STATISTICS
from .metrics.stats import IterationStats
from .outputs.output_collector import EngineOutput
from .ownership import takes_turns
from .requests.prepared_request import PreparedRequest
from .text.prompts import PromptType

if TYPE_CHECKING:
    from .metrics.reader import Metric


class LLMEngine(EngineBase):
    """Owns the client to one core. Calls from several threads take turns, each as a whole, except `shutdown`, the
    inherited controls, and what only looks.

    With the core in this process `model_executor` is its executor; otherwise there is no such attribute.
    """

    engine_core: SyncEngineCoreClient

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: str = DEFAULT_EXECUTOR_CLASS,
        log_stats: bool = False,
        *,
        stat_loggers: Sequence[StatLoggerFactory] = (),
        multiprocess_mode: bool = False,
    ) -> None:
        """`executor_class` is "package.module:Class". Raises what the core's start raises.

        `stat_loggers` get statistics even with `log_stats` off, which stands for the default loggers then.
        """

        def connect(log_stats: bool) -> EngineCoreClient:
            return make_client(multiprocess_mode, vllm_config, executor_class, log_stats)

        super().__init__(vllm_config, log_stats, stat_loggers, connect)
        self.turns = FairLock()
        self._paused = False  # by pause_generation() or sleep()
        self._held_outputs: list[EngineOutput] = []  # for the next step()
        if not multiprocess_mode:
            self.model_executor = self.engine_core.engine_core.executor  # type: ignore[attr-defined]

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        *,
        stat_loggers: Sequence[StatLoggerFactory] = (),
        disable_log_stats: bool = False,
    ) -> "LLMEngine":
        """The core runs in a process of its own unless VLLM_ENABLE_V1_MULTIPROCESSING=0."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            stat_loggers=stat_loggers,
            multiprocess_mode=envs.VLLM_ENABLE_V1_MULTIPROCESSING,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        *,
        stat_loggers: Sequence[StatLoggerFactory] = (),
        enable_multiprocessing: bool = False,
    ) -> "LLMEngine":
        """`enable_multiprocessing` puts the core into a process of its own whatever the environment says."""
        with core_ahead():
            return cls(
                engine_args.create_engine_config(usage_context),
                log_stats=not engine_args.disable_log_stats,
                stat_loggers=stat_loggers,
                multiprocess_mode=enable_multiprocessing or envs.VLLM_ENABLE_V1_MULTIPROCESSING,
            )

    @takes_turns
    def add_request(
        self,
        request_id: str,
        prompt: PromptType | PreparedRequest,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Queues one request and returns its internal id, which is unique; outputs carry `request_id`.

        A `PreparedRequest` in place of a prompt keeps its own id and params, and `prompt_text` is then its text.
        Raises TypeError and ValueError for what cannot be served, before anything is queued, and EngineDeadError.
        """
        self.adapters.require_enabled(lora_request)
        prepared = self.input_processor.process_inputs(
            request_id,
            prompt,
            params,
            arrival_time,
            tokenization_kwargs,
            trace_headers,
            priority,
            prompt_text=prompt_text,
        )
        self.use_adapter(prepared, lora_request)
        return self.add_prepared(prepared)

    @takes_turns
    def add_prepared(self, prepared: PreparedRequest) -> str:
        """Queues what `input_processor.process_inputs` has made; see `add_request`. On any failure nothing stays."""
        self.input_processor.assign_request_id(prepared)
        requests = self.output_processor.add_request(prepared)
        try:
            for request in requests:
                self.engine_core.add_request(request)
        except BaseException:
            self.abort_request(prepared.request_id, internal=True)
            raise
        return prepared.request_id

    @takes_turns
    def use_adapter(self, prepared: PreparedRequest, lora_request: LoRARequest | None) -> None:
        """Has the request be answered with the adapter, which the core reads where it has not. Raises ValueError."""
        if lora_request is not None:
            resolved = self.adapters.resolved(lora_request)
            prepared.request.adapter = self.adapters.find(resolved) or self._load_adapter(resolved)

    def _load_adapter(self, resolved: LoRARequest) -> LoadedAdapter:
        return self.adapters.enter(resolved, self.engine_core.add_lora(resolved))

    @takes_turns
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter, or says that it is still wanted. Raises ValueError for one that cannot be used."""
        self._load_adapter(self.adapters.resolved(lora_request))
        return True

    def list_loras(self) -> set[int]:
        """The numbers of the adapters in memory."""
        return set(self.engine_core.list_loras())

    @takes_turns
    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """Ends requests without further output. Ids are the caller's, or internal ones; unknown ids are ignored."""
        iteration_stats = IterationStats() if self.log_stats else None
        self.engine_core.abort_requests(self.output_processor.abort_requests(request_ids, internal, iteration_stats))
        if self.logger_manager is not None:
            # No further step would bring the news that nothing is left.
            idle = None if self.output_processor.has_unfinished_requests() else SchedulerStats()
            self.logger_manager.record(idle, iteration_stats)

    @takes_turns
    def step(self) -> list[EngineOutput]:
        """Outputs of the requests that have news; waits for the core where it has a process of its own.

        Returns an empty list at once when nothing is unfinished, or the engine is paused or asleep and nothing would
        come. Raises EngineDeadError.
        """
        if self._held_outputs or not self.has_unfinished_requests():
            held, self._held_outputs = self._held_outputs, []
            return held
        if self.is_stalled():
            return []
        outputs = self.engine_core.get_output()
        iteration_stats = IterationStats() if self.log_stats else None
        tokens = zip(outputs.handles, outputs.token_ids, strict=True)
        processed = self.output_processor.process_outputs(outputs.outputs, outputs.timestamp, iteration_stats, tokens)
        self.engine_core.abort_requests(processed.reqs_to_abort)
        if self.logger_manager is not None:
            self.logger_manager.record(outputs.scheduler_stats, iteration_stats)
            self.logger_manager.log_if_due()
        return processed.request_outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to bring."""
        return bool(self._held_outputs) or self.output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Each of a request's n answers counts."""
        return self.output_processor.get_num_unfinished_requests()

    @takes_turns
    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops scheduling: requests in flight are aborted, waited for or kept; new ones queue.

        What ends a request here comes out of the next `step()`.
        """
        self.engine_core.pause_scheduler(mode, clear_cache)
        if clear_cache:
            self._forget_pictures()
        self._paused = True

    @takes_turns
    def resume_generation(self) -> None:
        self.engine_core.resume_scheduler()
        self._paused = False

    @takes_turns
    def is_stalled(self) -> bool:
        """Whether the engine is paused or asleep, and nothing will come out of it before it is woken."""
        if self._held_outputs or not self._paused:
            return False
        running, waiting = self.engine_core.get_request_counts()
        held = self.engine_core.num_held_requests
        return bool(running + waiting + held >= self.get_num_unfinished_requests())

    @takes_turns
    def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Steps until nothing is in flight; what came of it is handed out by the next `step()`.

        Raises TimeoutError after `drain_timeout` seconds, looked at between steps, and at once where the engine is
        paused or asleep and nothing would come.
        """
        deadline = time.monotonic() + as_seconds("drain_timeout", drain_timeout)
        held, self._held_outputs = self._held_outputs, []
        try:
            while (remaining := self.get_num_unfinished_requests()) > 0:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{remaining} requests are still in flight after {drain_timeout} s")
                if self.is_stalled():
                    raise TimeoutError(f"{remaining} requests are still in flight, and the engine is paused or asleep")
                held += self.step()
        finally:
            self._held_outputs = held

    @takes_turns
    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses, then gives memory back: level 0 none, 1 the KV cache's, 2 the weights' too. New requests queue."""
        self.engine_core.sleep(level, mode)
        if level > 0:
            self._forget_pictures()
        self._paused = True
        self._record_sleep_state(1, level)

    @takes_turns
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes memory back, all of it or what `tags` names ("weights", "kv_cache"); goes on once it is complete."""
        self.engine_core.wake_up(tags)
        if not self.engine_core.is_sleeping():
            self._paused = False
            self._record_sleep_state(0, 0)

    def get_metrics(self) -> "list[Metric]":
        """A snapshot of every figure, under Prometheus' names. Needs `disable_log_stats=False`."""
        if self.logger_manager is None:
            raise RuntimeError(NO_STATISTICS)
        return self.logger_manager.get_metrics()

    def is_tracing_enabled(self) -> bool:
        return self.tracer is not None

    def do_log_stats_with_interval(self) -> None:
        """Writes the line of statistics if VLLM_LOG_STATS_INTERVAL has passed since the last; `step` does so too."""
        if self.logger_manager is not None:
            self.logger_manager.log_if_due()

    def do_log_stats(self) -> None:
        """Writes the line of statistics now."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the core. Repeated calls do nothing; an engine that is dropped does it by itself."""
        self.engine_core.shutdown(timeout)
        if self.tracer is not None:
            self.tracer.close()
