"""`AsyncLLM`: the engine for asyncio. Each request is an async generator of outputs; the core has its own process."""

import asyncio
import functools
import logging
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..client import make_async_client
from ..client.async_client import AsyncMPClient
from ..client.connection import ClientAddresses
from ..client.spawn import core_ahead
from ..protocol.config import VllmConfig
from ..protocol.errors import EngineDeadError, EngineGenerateError, raised_in, text_of
from ..protocol.lora import LoadedAdapter, LoRARequest
from ..protocol.param_checks import as_seconds, reject, reject_type
from ..protocol.params import SamplingParams
from ..protocol.pausing import PauseMode
from ..protocol.pooling import PoolingParams
from .engine_args import DEFAULT_EXECUTOR_CLASS, AsyncEngineArgs, EngineArgs, UsageContext
from .engine_base import EngineBase
from .metrics.loggers import StatLoggerFactory
from .metrics.manager import NO_STATISTICS
from .metrics.stats import IterationStats
from .output_handler import OutputHandler
from .outputs.output_collector import RequestOutputCollector
from .outputs.pooling_output import PoolingOutput, PoolingRequestOutput
from .outputs.request_output import RequestOutput
from .prompt_stream import PromptStreamError, empty_answer, first_piece, send_pieces
from .requests.prepared_request import PreparedRequest
from .requests.streaming_input import StreamingInput, as_piece
from .text.prompts import PromptType

if TYPE_CHECKING:
    from .metrics.reader import Metric

logger = logging.getLogger("corespan.engine")

INLINE_PROMPT_LENGTH = 2048
"""Characters, or token ids, up to which a prompt is processed in the event loop: a millisecond or so. Longer ones go
to a thread, lest they hold up everybody's streams; so do requests with a grammar, whose check may take seconds."""

NUM_PROMPT_THREADS = 4


class AsyncLLM(EngineBase):
    """One model behind asyncio. Controls inherited from `EngineControls` return awaitables.

    Used from one event loop at a time; a second loop may take over once the first has stopped, and raises RuntimeError
    before. `shutdown` may be called from any thread.
    """

    engine_core: AsyncMPClient

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: str = DEFAULT_EXECUTOR_CLASS,
        log_stats: bool = False,
        *,
        log_requests: bool = False,
        stat_loggers: Sequence[StatLoggerFactory] = (),
        client_addresses: ClientAddresses | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> None:
        """Returns when the core is up; raises what its start raises. `executor_class` is "package.module:Class".

        With `client_count` above 1 the core serves that many engines, each in a process of its own if need be: the
        first starts it, the others join with their index and its `client_addresses(index)`.

        `stat_loggers` get statistics even with `log_stats` off, which stands for the default loggers then.
        """

        def connect(log_stats: bool) -> AsyncMPClient:
            return make_async_client(
                vllm_config, executor_class, log_stats, client_addresses, client_count, client_index
            )

        super().__init__(vllm_config, log_stats, stat_loggers, connect, client_index)
        self.log_requests = log_requests
        self._finalizer = weakref.finalize(self, self.engine_core.shutdown)
        self._output_handler = OutputHandler(self.engine_core, self.output_processor, self.logger_manager)
        self._prompt_threads = ThreadPoolExecutor(NUM_PROMPT_THREADS, thread_name_prefix="corespan-prompt")

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        *,
        enable_log_requests: bool = False,
        disable_log_stats: bool = False,
        stat_loggers: Sequence[StatLoggerFactory] = (),
    ) -> "AsyncLLM":
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            log_requests=enable_log_requests,
            stat_loggers=stat_loggers,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        *,
        stat_loggers: Sequence[StatLoggerFactory] = (),
    ) -> "AsyncLLM":
        with core_ahead():
            return cls.from_vllm_config(
                engine_args.create_engine_config(usage_context),
                enable_log_requests=isinstance(engine_args, AsyncEngineArgs) and engine_args.enable_log_requests,
                disable_log_stats=engine_args.disable_log_stats,
                stat_loggers=stat_loggers,
            )

    def client_addresses(self, client_index: int) -> ClientAddresses:
        """What another engine needs to share this one's core, as client `client_index` of the `client_count`."""
        return self.engine_core.client_addresses(client_index)

    def generate(
        self,
        prompt: PromptType | PreparedRequest | AsyncIterator[StreamingInput],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs, shaped by `sampling_params.output_kind`, until one is `finished`.

        An async generator of `StreamingInput` in place of a prompt is answered piece by piece, each piece behind all
        that was said before; the request is finished when the generator is and its last piece is answered.

        Leaving early, by closing the generator or by cancellation, aborts the request. A consumer that is slow gets
        outputs merged, none lost. Raises ValueError and TypeError for what cannot be served, EngineDeadError when the
        core is or goes down, EngineGenerateError for anything else that ends this request.
        """
        add = functools.partial(
            self.add_request,
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            prompt_text=prompt_text,
            data_parallel_rank=data_parallel_rank,
        )
        return self._outputs(request_id, add)

    def encode(
        self,
        prompt: PromptType | PreparedRequest,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The one output of a prompt that is pooled. Leaving early aborts it; raises as `generate` does."""
        if not isinstance(pooling_params, PoolingParams):
            reject_type("pooling_params", pooling_params, "a PoolingParams")
        add = functools.partial(
            self.add_request,
            request_id,
            prompt,
            pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        return self._outputs(request_id, add)

    async def _outputs(
        self, request_id: str, add: Callable[[], Awaitable[RequestOutputCollector]]
    ) -> AsyncGenerator[Any, None]:
        """What comes through the collector of the request that `add` adds, up to the end. Leaving early aborts it."""
        collector = await add()
        finished = False
        try:
            while not finished:
                output = collector.get_nowait()
                if output is None:
                    await collector.arrival()
                    continue
                finished = output.finished
                yield output
        except PromptStreamError as error:
            raise error.cause from None
        except (EngineDeadError, EngineGenerateError):
            raise
        except Exception as error:
            raise EngineGenerateError(f"request {request_id!r} failed: {text_of(error)}") from error
        finally:
            collector.close()
            if not finished:
                await self.abort(collector.request_id, internal=True)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType | PreparedRequest | AsyncIterator[StreamingInput],
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        data_parallel_rank: int | None = None,
    ) -> RequestOutputCollector:
        """Queues one request; its outputs come through the collector. `generate` is this with an end taken care of.

        A `PreparedRequest` in place of a prompt keeps its own id and params, and `prompt_text` is then its text.
        """
        self._ensure_alive()
        self.adapters.require_enabled(lora_request)
        if data_parallel_rank not in (None, 0):
            reject("data_parallel_rank", data_parallel_rank, "None or 0: there is one engine")
        self._output_handler.ensure_running()
        process = functools.partial(
            self._process, request_id, arrival_time, tokenization_kwargs, trace_headers, priority, prompt_text
        )
        if isinstance(prompt, AsyncIterator):
            if self.vllm_config.parallel_config.engine_restart:
                raise ValueError("a prompt that comes in pieces cannot move to a new core; use engine_restart=0")
            if not isinstance(params, SamplingParams):
                reject_type("params", params, "a SamplingParams: a prompt that comes in pieces is answered, not pooled")
            if (piece := await first_piece(prompt, params)) is None:
                self.input_processor.check(request_id, params)
                return empty_answer(request_id, params)
            prepared = await process(piece)
            as_piece(prepared.request, prepared.request.cache_salt)
        else:
            prepared = await process(StreamingInput(prompt, params))  # type: ignore[arg-type]
        if lora_request is not None:
            resolved = self.adapters.resolved(lora_request)
            prepared.request.adapter = self.adapters.find(resolved) or await self._load_adapter(resolved)
        collector = await self._add(prepared)
        if isinstance(prompt, AsyncIterator):
            sending = send_pieces(
                prompt, prepared, self.output_processor, collector, process, self.engine_core.add_request_async
            )
            collector.input_task = asyncio.create_task(sending, name=f"corespan-prompt-{request_id}")
        return collector

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter, or says that it is still wanted. Raises ValueError for one that cannot be used."""
        self._output_handler.ensure_running()
        await self._load_adapter(self.adapters.resolved(lora_request))
        return True

    async def list_loras(self) -> set[int]:
        """The numbers of the adapters in memory."""
        return set(await self.engine_core.list_loras())

    async def _load_adapter(self, resolved: LoRARequest) -> LoadedAdapter:
        return self.adapters.enter(resolved, await self.engine_core.add_lora(resolved))

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Ends requests, named by the caller's ids or internal ones; unknown ids are ignored.

        Whoever waits for one of them gets a last output with finish_reason "abort".
        """
        self._output_handler.require_own_loop()
        iteration_stats = IterationStats() if self.log_stats else None
        aborted = self.output_processor.abort_requests(request_id, internal, iteration_stats)
        if self.logger_manager is not None:
            self.logger_manager.record(None, iteration_stats)
        await self.engine_core.abort_requests_async(aborted)

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops scheduling: requests in flight are aborted, waited for or kept frozen; new ones queue.

        When this returns, every stream that was being waited for has what there is, and no output follows.
        """
        self._output_handler.ensure_running()
        await self.engine_core.pause_scheduler(mode, clear_cache)
        if clear_cache:
            self._forget_pictures()
        await self._output_handler.catch_up()

    async def resume_generation(self) -> None:
        await self.engine_core.resume_scheduler()

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses, then gives memory back: level 0 none, 1 the KV cache's, 2 the weights' too. New requests queue."""
        self._output_handler.ensure_running()
        await self.engine_core.sleep(level, mode)
        if level > 0:
            self._forget_pictures()
        await self._output_handler.catch_up()
        self._record_sleep_state(1, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes memory back, all of it or what `tags` names ("weights", "kv_cache"); goes on once it is complete."""
        await self.engine_core.wake_up(tags)
        if not await self.engine_core.is_sleeping():
            self._record_sleep_state(0, 0)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Returns when nothing is in flight. Raises TimeoutError after `drain_timeout` seconds."""
        try:
            async with asyncio.timeout(as_seconds("drain_timeout", drain_timeout)):
                while self.output_processor.has_unfinished_requests():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            remaining = self.output_processor.get_num_unfinished_requests()
            raise TimeoutError(f"{remaining} requests are still in flight after {drain_timeout} s") from None

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the core is gone, dead or shut down: nothing will be generated any more."""
        return self.engine_core.engine_dead or self._output_handler.failure is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """A new exception that says why."""
        failure = self._output_handler.failure
        if failure is not None and not isinstance(failure, EngineDeadError):
            return EngineDeadError(raised_in("the output handler", failure))
        return self.engine_core.dead_error()

    async def check_health(self) -> None:
        """Raises EngineDeadError when the core is gone."""
        self._ensure_alive()

    async def get_metrics(self) -> "list[Metric]":
        """A snapshot of every figure, under Prometheus' names. Needs `disable_log_stats=False`."""
        if self.logger_manager is None:
            raise RuntimeError(NO_STATISTICS)
        return self.logger_manager.get_metrics()

    async def reset_mm_cache(self) -> None:
        """Forgets the pictures that were prepared, and what the core has computed of them."""
        self._forget_pictures()
        await self.engine_core.reset_mm_cache()

    async def is_tracing_enabled(self) -> bool:
        return self.tracer is not None

    async def do_log_stats(self) -> None:
        """Writes the line of statistics now."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the core, from any thread; repeated calls do nothing.

        Requests in flight get `timeout` seconds to finish (None: the configured `shutdown_timeout`), the rest are
        aborted; their streams end with what they have.
        """
        self.engine_core.shutdown(timeout)
        if self.tracer is not None:
            self.tracer.close()
        self._prompt_threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer.detach()

    async def _process(
        self,
        request_id: str,
        arrival_time: float | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        trace_headers: Mapping[str, str] | None,
        priority: int,
        prompt_text: str | None,
        piece: StreamingInput,
    ) -> PreparedRequest:
        params: Any = piece.sampling_params  # whatever the caller gave: checked where requests are processed
        process = functools.partial(
            self.input_processor.process_inputs,
            request_id,
            piece.prompt,
            params,
            arrival_time,
            tokenization_kwargs,
            trace_headers,
            priority,
            prompt_text=prompt_text,
        )
        has_grammar = isinstance(params, SamplingParams) and params.structured_outputs is not None
        if _prompt_length(piece.prompt) <= INLINE_PROMPT_LENGTH and not has_grammar:
            return process()
        return await asyncio.get_running_loop().run_in_executor(self._prompt_threads, process)

    async def _add(self, prepared: PreparedRequest) -> RequestOutputCollector:
        """Registers and sends the request, or its n children; on any failure none of them stays."""
        self.input_processor.assign_request_id(prepared)
        if self.log_requests:
            num_tokens = len(prepared.request.prompt_token_ids)
            logger.info("Request %s: %d prompt tokens, %s", prepared.request_id, num_tokens, prepared.params)
        collector = RequestOutputCollector(prepared.output_kind, prepared.request_id)
        requests = self.output_processor.add_request(prepared, collector)
        try:
            for request in requests:
                await self.engine_core.add_request_async(request)
        except BaseException:
            await self.abort(prepared.request_id, internal=True)
            raise
        return collector

    def _ensure_alive(self) -> None:
        if self.errored:
            raise self.dead_error


AsyncLLMEngine = AsyncLLM


def _prompt_length(prompt: PromptType) -> int:
    """Characters or token ids; 0 for what is no prompt, which is found out where prompts are parsed."""
    if isinstance(prompt, Mapping):
        return max((len(part) for part in prompt.values() if isinstance(part, (str, list))), default=0)
    return len(prompt) if isinstance(prompt, (str, list)) else 0
