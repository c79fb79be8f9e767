"""Which requests there are and where each of them stands: waiting, running, preempted, ended. The base of `Scheduler`,
which decides when they move.
"""

import itertools
import logging
from collections.abc import Iterable

from ...protocol.config import VllmConfig
from ...protocol.outputs import EventType, SchedulerStats
from ..kv_cache.kv_cache_manager import KVCacheManager
from .grammar_gate import GrammarGate, GrammarManager
from .pause import PauseState
from .request import Request, RequestStatus
from .request_queue import RequestQueue, order_key

logger = logging.getLogger("corespan.core")


class RequestLedger:
    """A live request is in `requests` and in exactly one of: `running`, `waiting`, `preempted`, the requests whose
    grammar is being compiled, the sessions that wait for more prompt. Only running requests hold blocks.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        num_gpu_blocks: int,
        structured_output_manager: GrammarManager | None = None,
        log_stats: bool = False,
    ) -> None:
        cache_config = vllm_config.cache_config
        self._max_model_len = vllm_config.scheduler_config.max_model_len
        self._log_stats = log_stats
        self.kv_cache_manager = KVCacheManager(
            num_gpu_blocks, cache_config.block_size, cache_config.enable_prefix_caching
        )
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in the order in which they began
        self._order_key = order_key(vllm_config.scheduler_config.policy)
        self.waiting = RequestQueue(self._order_key)
        self.preempted = RequestQueue(self._order_key)
        self._grammars = GrammarGate(structured_output_manager)
        self._idle_sessions: dict[str, Request] = {}
        self._removed_req_ids: set[str] = set()  # the runner has still to be told
        self._ended_unrun: list[Request] = []  # the shell has still to be told
        self._arrival_counter = itertools.count()
        self._pause_state = PauseState.UNPAUSED
        self._num_preemptions = 0

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request, or a further piece of prompt for a resumable one that is known by its id.

        Raises ValueError for an id in use and for a prompt that leaves no room for a token.
        """
        known = self.requests.get(request.request_id)
        if known is not None and known.resumable:
            self._extend_session(known, request)
            return
        if known is not None:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.num_prompt_tokens >= self._max_model_len:
            raise ValueError(
                f"the prompt has {request.num_prompt_tokens} tokens; with max_model_len {self._max_model_len} "
                f"it may have at most {self._max_model_len - 1}"
            )
        if request.num_tokens > self._max_model_len:
            raise ValueError(f"the request brings {request.num_tokens} tokens; max_model_len is {self._max_model_len}")
        request.limit_length(self._max_model_len)
        self.requests[request.request_id] = request
        if self._log_stats:
            request.record_event(EventType.QUEUED)
        self._enqueue(request)

    def finish_requests(
        self, request_ids: Iterable[str] | None, status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> list[tuple[str, int]]:
        """End these requests, None: all of them, without an output. Their blocks are free at once.

        Returns (request id, client index) of those that were live; other ids are ignored.
        """
        finished = []
        for request_id in list(self.requests) if request_ids is None else request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, status)
                finished.append((request_id, request.client_index))
        self._drop_ended_from_running()
        return finished

    def has_requests(self) -> bool:
        """Whether a step has anything to do, be it only to pass on what has ended."""
        return bool(self._removed_req_ids or self._ended_unrun) or self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests that steps can bring forward in the present pause state."""
        if self._pause_state is PauseState.PAUSED_ALL:
            return 0
        begun = len(self.running) + len(self.preempted)
        if self._pause_state is PauseState.PAUSED_NEW:
            return begun
        return begun + len(self.waiting) + len(self._grammars)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting) requests, whatever the pause state."""
        return len(self.running), len(self.requests) - len(self.running)

    # Controls

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached content. False, and nothing done, while a request holds blocks.

        With `reset_running_requests` those that run are preempted first and compute everything again.
        """
        if reset_running_requests:
            for request in reversed(tuple(self.running)):
                self._preempt(request)
        if self.kv_cache_manager.reset_prefix_cache():
            return True
        logger.warning("the prefix cache was not reset: %d requests hold blocks of it", len(self.running))
        return False

    def make_stats(self) -> SchedulerStats:
        """The present state, and the counts since the last call."""
        num_running, num_waiting = self.get_request_counts()
        stats = SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_skipped_waiting_reqs=len(self._grammars) + len(self._idle_sessions),
            kv_cache_usage=self.kv_cache_manager.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_stats=self.kv_cache_manager.take_stats(),
        )
        self._num_preemptions = 0
        return stats

    # Moves

    def _preempt(self, request: Request) -> None:
        """Take everything computed from a running request and let it wait for its turn to come again."""
        self.running.remove(request)
        self.kv_cache_manager.revoke(request.request_id)
        self._release(request)
        request.reset_progress()
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        if self._log_stats:
            request.record_event(EventType.PREEMPTED)
        self.preempted.add(request)

    def _start(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if self._log_stats:
            request.record_event(EventType.SCHEDULED)

    # Endings

    def _end_run(self, request: Request) -> None:
        """A running request has its last token; an open session waits for more prompt instead of finishing."""
        if not request.resumable or request.status is RequestStatus.FINISHED_ERROR:
            self._finish(request, request.status)
            return
        self._release(request)
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        self._idle_sessions[request.request_id] = request
        if request.pending_prompts:
            self._extend_session(request, request.pending_prompts.popleft())

    def _extend_session(self, request: Request, piece: Request) -> None:
        """More prompt for an open session; a piece that is not resumable closes it."""
        if request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            request.pending_prompts.append(piece)
        elif not piece.resumable:
            self._finish(request, RequestStatus.FINISHED_ABORTED)
        else:
            del self._idle_sessions[request.request_id]
            request.continue_with(piece)
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        request.arrival_order = next(self._arrival_counter)
        if request.has_all_tokens:
            self._end_unrun(request, RequestStatus.FINISHED_LENGTH_CAPPED, None)
        elif request.use_structured_output:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self._grammars.add(request)
        else:
            request.status = RequestStatus.WAITING
            self.waiting.add(request)

    def _end_for_size(self, request: Request) -> None:
        """End a request that no cache of this size can hold: it would wait for ever, and hold up all behind it."""
        capacity = self.kv_cache_manager.capacity
        message = f"the request needs room for {request.num_tokens} tokens; the whole KV cache holds {capacity}"
        self._end_unrun(request, RequestStatus.FINISHED_ERROR, message)

    def _end_unrun(self, request: Request, status: RequestStatus, stop_reason: str | None) -> None:
        """End a request in a way that the shell learns with the step's outputs."""
        self._finish(request, status)
        request.stop_reason = stop_reason
        self._ended_unrun.append(request)
        self._drop_ended_from_running()

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Forget a request, wherever it stands; the caller drops it from `running`."""
        del self.requests[request.request_id]
        self.waiting.remove(request)
        self.preempted.remove(request)
        self._grammars.remove(request)
        self._idle_sessions.pop(request.request_id, None)
        request.status = status
        self._release(request)

    def _release(self, request: Request) -> None:
        """Take the request out of the batch; one without blocks is not in it."""
        if request.blocks:
            self._removed_req_ids.add(request.request_id)
            self.kv_cache_manager.free(request)

    def _drop_ended_from_running(self) -> None:
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
