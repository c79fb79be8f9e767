"""The engine core: executor, KV cache and scheduler put together, and the step that drives them.

The in-process client calls it directly; `EngineCoreProc` drives it from a process of its own.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from ..protocol.config import VllmConfig
from ..protocol.errors import as_error_of, errors_of, may_be_ctrl_c, text_of
from ..protocol.lora import NO_ADAPTERS, LoRARequest
from ..protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from ..protocol.pausing import PAUSE_MODES, SLEEP_LEVELS, WAKE_UP_TAGS, PauseMode
from ..protocol.requests import EngineCoreRequest
from ..protocol.user_classes import load_class
from .executor.abstract import Executor
from .kv_cache.block_hash import BlockHasher
from .kv_cache.groups import KVCacheConfig
from .kv_sizing import NULL_BLOCKS, num_kv_blocks, with_kv_blocks
from .models.registry import resolve_model_spec
from .models.vision import VisionSpec
from .multimodal.encoder import check_data
from .multimodal.picture_cache import MissingPicturesError, PictureCache
from .profile_ranges import profile_range
from .request_checks import check_request
from .scheduler.pause import PauseState
from .scheduler.request import Request, RequestStatus, core_request_id
from .scheduler.scheduler import Scheduler
from .structured_output.manager import StructuredOutputManager

logger = logging.getLogger("corespan.core")

UTILITIES = frozenset(
    {
        "add_lora",
        "collective_rpc",
        "get_request_counts",
        "get_supported_tasks",
        "is_scheduler_paused",
        "is_sleeping",
        "list_loras",
        "pause_scheduler",
        "pin_lora",
        "profile",
        "remove_lora",
        "reset_mm_cache",
        "reset_prefix_cache",
        "resume_scheduler",
        "sleep",
        "wake_up",
    }
)
"""The methods that clients may call by name."""

Emit = Callable[[int, EngineCoreOutputs], None]
"""Takes outputs that no step returns, with the index of the client they are for."""


class DuplicateRequestError(ValueError):
    """A request under an id that is in flight. The request in flight is not touched."""


class Abort(NamedTuple):
    """What a client no longer wants. Its ids are its own: another client's requests may have the same."""

    client_index: int
    request_ids: list[str]


class EngineCore:
    """Not thread-safe, but for `preprocess_add_request` and `abort_queue`, which an input thread may use."""

    def __init__(self, vllm_config: VllmConfig, executor_class: str, log_stats: bool, emit: Emit) -> None:
        """Loads the model and sizes the KV cache. `executor_class` is "package.module:Class".

        Raises ValueError when the cache cannot hold one request of `max_model_len`.
        """
        self._emit = emit
        self.abort_queue: queue.SimpleQueue[Abort] = queue.SimpleQueue()
        self._idle_actions: list[tuple[Callable[[], None], Future[None]]] = []
        self.executor: Executor = load_class(executor_class, Executor, "executor_class")(vllm_config)  # type: ignore[type-abstract]
        try:
            kv_groups = self.executor.kv_groups()
            self.vllm_config = self._initialize_kv_cache(vllm_config, KVCacheConfig.of(vllm_config, kv_groups))
            self.structured_output_manager = StructuredOutputManager(self.vllm_config)
            self.scheduler = Scheduler(
                self.vllm_config,
                self._num_gpu_blocks + NULL_BLOCKS,
                structured_output_manager=self.structured_output_manager,
                log_stats=log_stats,
                kv_groups=kv_groups,
            )
        except BaseException:
            self.executor.shutdown()
            raise
        cache_config = self.vllm_config.cache_config
        self._vision: VisionSpec | None = None
        self._pictures = PictureCache(0)
        if vllm_config.mm_config is not None:
            self._vision = resolve_model_spec(vllm_config.model_config.hf_config).vision
            self._pictures = PictureCache(vllm_config.mm_config.cache_bytes)
        self._block_hasher = BlockHasher(cache_config.block_size) if cache_config.enable_prefix_caching else None

    @property
    def _num_gpu_blocks(self) -> int:
        num_gpu_blocks = self.vllm_config.cache_config.num_gpu_blocks
        assert num_gpu_blocks is not None
        return num_gpu_blocks

    def _initialize_kv_cache(self, vllm_config: VllmConfig, kv_config: KVCacheConfig) -> VllmConfig:
        num_blocks = num_kv_blocks(
            vllm_config, kv_config, self.executor.kv_block_bytes(), self.executor.determine_available_memory()
        )
        self.executor.initialize_kv_cache(num_blocks + NULL_BLOCKS)
        return with_kv_blocks(vllm_config, kv_config, num_blocks)

    # Requests

    def preprocess_add_request(self, request: EngineCoreRequest) -> Request:
        """Everything about a new request that needs no scheduler; may run in another thread.

        Raises ValueError for a request that the model cannot take.
        """
        check_request(request, self.vllm_config.model_config)
        if request.adapter is not None and self.vllm_config.lora_config is None:
            raise ValueError(NO_ADAPTERS)
        self._check_features(request)
        prepared = Request.from_engine_core_request(request, self._block_hasher)
        self.structured_output_manager.grammar_init(prepared)
        return prepared

    def _check_features(self, request: EngineCoreRequest) -> None:
        """Raises ValueError for pictures that the encoder could not take."""
        if not request.mm_features:
            return
        config = self.vllm_config.mm_config
        if self._vision is None or config is None:
            raise ValueError("mm_features are given, but this model takes text only")
        request.mm_features = self._pictures.completed(request.mm_features)
        for feature in request.mm_features:
            check_data(feature, self._vision)
            if feature.mm_position.num_embeds > config.encoder_capacity:
                raise ValueError(f"mm_features: a picture of more than {config.encoder_capacity} tokens")
        self._pictures.keep(request.mm_features)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request; one that cannot be prepared ends at once, with an error as its output.

        Raises DuplicateRequestError when a request of the same id is in flight.
        """
        try:
            prepared = self.preprocess_add_request(request)
        except Exception as error:
            self.fail_request(request, error)
            return
        self.add_prepared_request(prepared)

    def add_prepared_request(self, request: Request) -> None:
        """Like `add_request`, after `preprocess_add_request`."""
        known = self.scheduler.table.requests.get(request.request_id)
        if known is not None and not known.resumable:
            raise DuplicateRequestError(f"a request with id {request.client_request_id!r} is in flight")
        try:
            self.scheduler.add_request(request)
        except Exception as error:
            self.fail_request(request, error)

    def fail_request(self, request: EngineCoreRequest | Request, error: BaseException) -> None:
        """Ends a request that never reached the scheduler, or asks for it again where it lacks pictures."""
        if isinstance(error, MissingPicturesError):
            missed = EngineCoreOutput(_clients_id(request), [], handle=request.handle, resend=True)
            self._emit(request.client_index, EngineCoreOutputs(outputs=[missed], timestamp=time.monotonic()))
            return
        logger.error("Request %s failed while being added", _clients_id(request), exc_info=error)
        self._emit_finished([request], FinishReason.ERROR, f"{type(error).__name__}: {text_of(error)}")

    def abort_requests(self, request_ids: list[str], client_index: int = 0) -> None:
        """Frees what these requests of the client hold; no output follows. Unknown ids are ignored."""
        core_ids = [core_request_id(client_index, request_id) for request_id in request_ids]
        self.scheduler.finish_requests(core_ids, RequestStatus.FINISHED_ABORTED)

    def abort_client_requests(self, client_index: int) -> None:
        """Frees what the requests of a client hold that has gone away."""
        requests = self.scheduler.table.requests.values()
        core_ids = [request.request_id for request in requests if request.client_index == client_index]
        self.scheduler.finish_requests(core_ids, RequestStatus.FINISHED_ABORTED)

    def abort_all_requests(self) -> None:
        """Ends every request, with an output that says so."""
        requests = list(self.scheduler.table.requests.values())
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._emit_finished(requests, FinishReason.ABORT)

    def _emit_finished(
        self, requests: Iterable[EngineCoreRequest | Request], reason: FinishReason, stop_reason: str | None = None
    ) -> None:
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for request in requests:
            output = EngineCoreOutput(
                _clients_id(request),
                [],
                finish_reason=reason,
                stop_reason=stop_reason,
                trace_headers=request.trace_headers,
                handle=request.handle,
            )
            by_client.setdefault(request.client_index, []).append(output)
        for client_index, outputs in by_client.items():
            self._emit(client_index, EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic()))

    # The step

    def has_work(self) -> bool:
        """Whether a step could get anything done in the present pause state."""
        return self.scheduler.has_requests()

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Schedules, runs the model and takes in what it sampled: outputs by client, and whether the model ran.

        Aborts that arrive while the model runs take effect before its output is looked at.
        """
        if not self.has_work():
            return {}, False
        with profile_range("schedule"):
            scheduler_output = self.scheduler.schedule()
        with profile_range("execute"):
            runner_output = self.executor.execute_model(scheduler_output)
        self.process_abort_queue()
        with profile_range("update"):
            outputs = self.scheduler.update_from_output(scheduler_output, runner_output)
        return outputs, scheduler_output.total_num_scheduled_tokens > 0

    def process_abort_queue(self) -> None:
        """To be called before anything is added that came behind an abort: its id may be in use again."""
        while not self.abort_queue.empty():
            abort = self.abort_queue.get()
            self.abort_requests(abort.request_ids, abort.client_index)

    def run_idle_actions(self) -> None:
        """Does what was put off until nothing is left in flight. To be called whenever `has_work()` is false."""
        actions, self._idle_actions = self._idle_actions, []
        for action, done in actions:
            _settle(action, done)

    def _when_idle(self, action: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()
        if self.has_work():
            self._idle_actions.append((action, done))
        else:
            _settle(action, done)
        return done

    # Utilities

    def call_utility(self, method: str, args: Sequence[object]) -> Any:
        """The method's result, which may be a Future that a later step completes.

        Raises AttributeError for a method that is not one of `UTILITIES`, and whatever the method raises, but for what
        is no error: that, as a RuntimeError (see `as_error_of`).
        """
        if method not in UTILITIES:
            raise AttributeError(f"the engine core has no utility {method!r}")
        with errors_of(_called(method, args)):
            return getattr(self, method)(*args)

    def get_supported_tasks(self) -> list[str]:
        pooler = self.vllm_config.model_config.pooler
        return ["generate"] if pooler is None else list(pooler.supported_tasks)

    def get_request_counts(self) -> tuple[int, int]:
        """Requests (running, waiting)."""
        return self.scheduler.get_request_counts()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Forgets pictures, and their embeddings that no running request needs."""
        self._pictures.reset()
        self.scheduler.reset_encoder_cache()

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> "Future[None]":
        """Done once nothing runs any more. New requests queue until `resume_scheduler`.

        Raises ValueError for an unknown mode.
        """
        return self._pause(mode, clear_cache, lambda: None)

    def _pause(self, mode: PauseMode, clear_cache: bool, then: Callable[[], None]) -> "Future[None]":
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode is {mode!r}; it must be one of {', '.join(PAUSE_MODES)}")
        if mode == "abort":
            self.abort_all_requests()
        self.scheduler.pause_state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW

        def paused() -> None:
            if clear_cache:
                self.scheduler.reset_prefix_cache(reset_running_requests=mode == "keep")
                self.reset_mm_cache()
            then()

        return self._when_idle(paused)

    def resume_scheduler(self) -> None:
        """A pause or sleep that has not come about yet is called off, and fails. Raises RuntimeError in sleep."""
        if self.executor.is_sleeping:
            raise RuntimeError("the engine is asleep: wake_up() resumes it")
        for _, done in self._idle_actions:
            done.set_exception(RuntimeError("resumed before everything in flight had finished"))
        self._idle_actions.clear()
        self.scheduler.pause_state = PauseState.UNPAUSED

    def is_scheduler_paused(self) -> bool:
        return self.scheduler.pause_state is not PauseState.UNPAUSED

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> "Future[None]":
        """Pauses, then gives memory back: level 0 none, 1 the KV cache's, 2 the weights' too."""
        if level not in SLEEP_LEVELS:
            raise ValueError(f"sleep level is {level!r}; it must be 0, 1 or 2")
        if level == 0:
            return self._pause(mode, False, lambda: None)

        return self._pause(mode, True, lambda: self.executor.sleep(level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Scheduling goes on once all memory is back. Raises ValueError for an unknown tag."""
        unknown = set(tags or ()) - set(WAKE_UP_TAGS)
        if unknown:
            raise ValueError(f"wake_up tags {sorted(unknown)} are unknown; there are {', '.join(WAKE_UP_TAGS)}")
        memory_tags = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        if self.executor.is_sleeping and memory_tags != []:
            self.executor.wake_up(memory_tags)
        if not self.executor.is_sleeping:
            self.resume_scheduler()

    def is_sleeping(self) -> bool:
        return self.executor.is_sleeping or self.is_scheduler_paused()

    def add_lora(self, lora_request: object) -> str:
        """Sees to it that the adapter is in memory; the digest of its weights. `lora_request`: as plain data.

        Raises ValueError for one that cannot be used.
        """
        digests = self.executor.collective_rpc("add_lora", args=(msgspec.convert(lora_request, LoRARequest),))
        return str(digests[0])

    def remove_lora(self, lora_int_id: int) -> bool:
        return all(self.executor.collective_rpc("remove_lora", args=(lora_int_id,)))

    def pin_lora(self, lora_int_id: int) -> bool:
        """Raises ValueError for an adapter that is not in memory."""
        return all(self.executor.collective_rpc("pin_lora", args=(lora_int_id,)))

    def list_loras(self) -> list[int]:
        return list(self.executor.collective_rpc("list_loras")[0])

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> list[str | None]:
        """Stopping returns the paths of the traces, one a worker."""
        return self.executor.profile(is_start, profile_prefix)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> list[Any]:
        """Calls a function with each worker, or the worker's method of that name if clients may call it.

        Raises NotImplementedError for any other name.
        """
        if isinstance(method, str) and method not in self.executor.rpc_methods:
            known = ", ".join(sorted(self.executor.rpc_methods))
            raise NotImplementedError(f"workers have no method {method!r} that clients may call; there are {known}")
        return self.executor.collective_rpc(method, timeout, tuple(args), dict(kwargs or {}))

    def shutdown(self) -> None:
        self.structured_output_manager.shutdown()
        self.executor.shutdown()


def _clients_id(request: EngineCoreRequest | Request) -> str:
    return request.client_request_id if isinstance(request, Request) else request.request_id


def _called(method: str, args: Sequence[object]) -> str:
    """The call as a reader would name it: of `collective_rpc`, also the worker's method."""
    return f"{method}({args[0]!r})" if method == "collective_rpc" and args and isinstance(args[0], str) else method


def _settle(action: Callable[[], None], done: "Future[None]") -> None:
    try:
        action()
    except BaseException as error:
        if may_be_ctrl_c(error):
            raise
        done.set_exception(as_error_of("pausing", error))
    else:
        done.set_result(None)
