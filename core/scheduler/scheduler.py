"""Decides at each step which tokens of which requests are computed, and takes in what came of it.

Owned by `EngineCore`, called by its busy loop only: `schedule()`, then the model, then `update_from_output()`, which
belongs to every `schedule()`, also to one that planned nothing.
"""

import itertools
import logging
from collections.abc import Iterable

from ...protocol.config import VllmConfig
from ...protocol.outputs import EngineCoreOutputs, EventType, PrefillStats, SchedulerStats
from ..kv_cache.kv_cache_manager import KVCacheManager
from .grammar_gate import GrammarGate, GrammarManager
from .output import ModelRunnerOutput, SchedulerOutput
from .pause import PauseState
from .request import Request, RequestStatus
from .request_queue import RequestQueue, order_key
from .step_outputs import StepOutputs, row_of
from .step_plan import StepPlan

logger = logging.getLogger("corespan.core")


class Scheduler:
    """Requests, their order, and the token budget.

    Every request just tries to get all its tokens computed, prompt or output alike. Running requests come first, in
    the order in which they began; then waiting ones enter, each with room for all its tokens so far, so a prompt that
    is computed in chunks never has to give way for want of blocks it had been promised. When a running request finds no
    free block, the one that began last (fcfs) or matters least (priority) is preempted: its blocks are freed and its
    tokens computed again later.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        num_gpu_blocks: int,
        structured_output_manager: GrammarManager | None = None,
        log_stats: bool = False,
    ) -> None:
        config, cache_config = vllm_config.scheduler_config, vllm_config.cache_config
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._max_model_len = config.max_model_len
        self._chunked_prefill = config.enable_chunked_prefill
        self._long_prefill_token_threshold = config.long_prefill_token_threshold
        self._policy = config.policy
        self._block_size = cache_config.block_size
        self._log_stats = log_stats
        self._grammars = GrammarGate(structured_output_manager)
        self.kv_cache_manager = KVCacheManager(num_gpu_blocks, self._block_size, cache_config.enable_prefix_caching)

        self.requests: dict[str, Request] = {}  # all that have not finished
        self.running: list[Request] = []
        self._order_key = order_key(self._policy)
        self.waiting = RequestQueue(self._order_key)
        self.preempted = RequestQueue(self._order_key)
        self._idle_sessions: dict[str, Request] = {}  # wait for more prompt; they hold no blocks
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
            kv_cache_usage=self.kv_cache_manager.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_stats=self.kv_cache_manager.take_stats(),
        )
        self._num_preemptions = 0
        return stats

    # A step, first half

    def schedule(self) -> SchedulerOutput:
        """Plan a step. It may be empty."""
        plan = StepPlan(0 if self._pause_state is PauseState.PAUSED_ALL else self._max_num_batched_tokens)
        if len(self._grammars):
            self._admit_compiled()
        self._schedule_running(plan)
        if not plan.has_preempted:
            self._schedule_waiting(plan)
        removed, self._removed_req_ids = self._removed_req_ids, set()
        output = plan.commit(removed)
        self._grammars.constrain(output, plan.requests())
        return output

    def _schedule_running(self, plan: StepPlan) -> None:
        block_size = self._block_size
        for request in tuple(self.running):
            if plan.budget <= 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted in favour of another one just now
            num_new = len(request.token_ids) - request.num_computed_tokens
            if num_new != 1:
                num_new = self._chunk(num_new, plan.budget)
                if num_new == 0:
                    continue
            end = request.num_computed_tokens + num_new
            # A single token matters to the cache only where it fills a block or begins one.
            if (num_new > 1 or end % block_size <= 1) and not self._allocate(request, end, plan):
                continue
            plan.running.append(request)
            plan.num_tokens[request.request_id] = num_new
            plan.budget -= num_new

    def _schedule_waiting(self, plan: StepPlan) -> None:
        while plan.budget > 0 and len(self.running) < self._max_num_seqs:
            queue = self._next_queue()
            request = queue.peek() if queue is not None else None
            if queue is None or request is None:
                break
            if not self.kv_cache_manager.can_ever_hold(request.num_tokens):
                self._end_for_size(request, request.num_tokens)
            elif self._admit(request, plan):
                queue.pop()
                self._start(request)
            else:
                break

    def _next_queue(self) -> RequestQueue | None:
        """Where the next request comes from: preempted ones have begun and may go on while new ones are held."""
        preempted = self.preempted.peek()
        if self._pause_state is not PauseState.UNPAUSED:
            return self.preempted if preempted is not None else None
        waiting = self.waiting.peek()
        if preempted is None:
            return self.waiting
        if waiting is None or self._order_key(preempted) < self._order_key(waiting):
            return self.preempted
        return self.waiting

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Put a request into the plan; False when the blocks or the budget do not suffice."""
        cached_blocks = self.kv_cache_manager.get_computed_blocks(request)
        num_cached = len(cached_blocks) * self._block_size
        num_new = self._chunk(request.num_tokens - num_cached, plan.budget)
        if num_new == 0:
            return False
        # One block is left for each request that runs, lest the newcomer be preempted by their next tokens.
        keep_free = len(self.running)
        if self.kv_cache_manager.allocate_slots(request, request.num_tokens, cached_blocks, keep_free) is None:
            return False
        self.kv_cache_manager.cache_blocks(request, num_cached + num_new)
        request.num_computed_tokens = num_cached
        if request.status is not RequestStatus.PREEMPTED:
            self.kv_cache_manager.record_lookup(request.num_tokens, num_cached)
            request.prefill_stats = PrefillStats(request.num_prompt_tokens, num_cached)
        plan.entering.append(request)
        plan.num_tokens[request.request_id] = num_new
        plan.budget -= num_new
        return True

    def _start(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if self._log_stats:
            request.record_event(EventType.SCHEDULED)

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """How many of these tokens the step takes; 0 when it has no room and they may not be split."""
        if 0 < self._long_prefill_token_threshold < num_tokens:
            num_tokens = self._long_prefill_token_threshold
        if num_tokens <= budget:
            return num_tokens
        return budget if self._chunked_prefill else 0

    def _allocate(self, request: Request, end: int, plan: StepPlan) -> bool:
        """Blocks for a running request's first `end` tokens, preempting others for them.

        False when the request itself had to go.
        """
        kv_cache_manager = self.kv_cache_manager
        while (block_ids := kv_cache_manager.allocate_slots(request, end)) is None:
            if not kv_cache_manager.can_ever_hold(end):
                self._end_for_size(request, end)
                return False
            victim = self.running[-1] if self._policy == "fcfs" else max(self.running, key=self._order_key)
            plan.drop(victim)
            plan.has_preempted = True
            self._preempt(victim)
            if victim is request:
                return False
        if block_ids:
            plan.new_blocks[request.request_id] = block_ids
        kv_cache_manager.cache_blocks(request, end)
        return True

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

    def _admit_compiled(self) -> None:
        """Queue the requests whose grammar is there by now, each in its old place; end those whose grammar failed."""
        ready, failed = self._grammars.poll()
        for request in ready:
            request.status = RequestStatus.WAITING
            self.waiting.add(request)
        for request, error in failed:
            self._end_unrun(request, RequestStatus.FINISHED_ERROR, error)

    # A step, second half

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the step's tokens. The shell's messages, by client index.

        Requests that were finished or preempted since `schedule()` are passed over.
        """
        outputs = StepOutputs()
        if runner_output.failed_reqs:
            self._fail(scheduler_output, runner_output.failed_reqs)
        self.kv_cache_manager.commit()
        for ended in self._ended_unrun:
            outputs.add(ended, [])
        self._ended_unrun.clear()
        if runner_output.prompt_logprobs:
            self._keep_prompt_logprobs(runner_output)
        has_ended = False
        logprobs = runner_output.logprobs
        for row, request_id in enumerate(runner_output.req_ids):
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            token_id = runner_output.sampled_token_ids[row]
            stopped = request.append_output_token(token_id)
            if request.use_structured_output and not stopped:
                stopped = not self._grammars.accept(request, token_id)
            if request.num_logprobs is not None and logprobs is not None:
                outputs.add(request, [token_id], row_of(logprobs, row, request.num_logprobs))
            elif stopped or request.events or request.prefill_stats is not None:
                outputs.add(request, [token_id])
            else:
                outputs.add_token(request, token_id)
            if stopped:
                has_ended = True
                self._end_run(request)
        if has_ended:
            self._drop_ended_from_running()
        return outputs.build(self.make_stats() if self._log_stats else None)

    def _keep_prompt_logprobs(self, runner_output: ModelRunnerOutput) -> None:
        """They are sent whole, with the request's first token."""
        for request_id, chunk in runner_output.prompt_logprobs.items():
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING and not request.prompt_logprobs_sent:
                request.prompt_logprobs.append(chunk)

    def _fail(self, scheduler_output: SchedulerOutput, failed_reqs: dict[str, str]) -> None:
        """End the requests that failed in the runner, and nobody else.

        What they should have written in this step is not there. A request that shares such blocks (it entered in this
        very step) has computed with junk: it is preempted, and its token is passed over and sampled again.
        """
        void_ids: set[int] = set()
        for request_id, error in failed_reqs.items():
            void_ids.update(self.kv_cache_manager.revoke(request_id))
            request = self.requests.get(request_id)
            if request is not None:
                self._end_unrun(request, RequestStatus.FINISHED_ERROR, error)
        if not void_ids:
            return
        for request_id in scheduler_output.num_scheduled_tokens:  # whoever shares comes later in the batch
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                void_ids.update(self.kv_cache_manager.revoke(request_id))
            elif any(block.block_id in void_ids for block in request.blocks):
                void_ids.update(self.kv_cache_manager.revoke(request_id))
                self._preempt(request)

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

    def _end_for_size(self, request: Request, num_tokens: int) -> None:
        capacity = self.kv_cache_manager.block_pool.num_usable_blocks * self._block_size
        message = f"the request needs room for {num_tokens} tokens; the whole KV cache holds {capacity}"
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
