"""Decides at each step which tokens of which requests are computed, and takes in what came of it.

Owned by `EngineCore`, called by its busy loop only: `schedule()`, then the model, then `update_from_output()`, which
belongs to every `schedule()`, also to one that planned nothing.
"""

from ...protocol.config import VllmConfig
from ...protocol.outputs import EngineCoreOutputs, PrefillStats, SchedulerStats
from ..speculation.ngram import MAX_STEP_TOKENS, NgramProposer
from .grammar_gate import GrammarManager
from .output import ModelRunnerOutput, SchedulerOutput
from .pause import PauseState
from .request import Request, RequestStatus
from .request_ledger import RequestLedger
from .request_queue import RequestQueue
from .step_outputs import StepOutputs, row_of
from .step_plan import StepPlan


class Scheduler(RequestLedger):
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
        super().__init__(vllm_config, num_gpu_blocks, structured_output_manager, log_stats)
        config = vllm_config.scheduler_config
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._chunked_prefill = config.enable_chunked_prefill
        self._long_prefill_token_threshold = config.long_prefill_token_threshold
        self._policy = config.policy
        self._block_size = vllm_config.cache_config.block_size
        self._proposer = NgramProposer.for_engine(vllm_config)

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
        output = plan.to_output(removed)
        if plan.constrained:
            self._grammars.constrain(output, plan.constrained)
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
            if self._proposer is not None and num_new == 1:
                num_new += self._add_draft(request, end, plan)
            plan.add(request, num_new)

    def _add_draft(self, request: Request, end: int, plan: StepPlan) -> int:
        """Put a draft behind the request's last token, if one is at hand and costs nobody anything; its length."""
        assert self._proposer is not None
        room = min(MAX_STEP_TOKENS - max(len(self.running), sum(plan.num_tokens.values()) + 1), plan.budget - 1)
        draft = self._proposer.propose(request, room)
        if not draft:
            return 0
        new_blocks = self.kv_cache_manager.allocate_slots(request, end + len(draft), keep_free=len(self.running))
        if new_blocks is None:
            return 0
        if new_blocks:
            plan.new_blocks.setdefault(request.request_id, []).extend(new_blocks)
        plan.drafts[request.request_id] = draft
        return len(draft)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        while plan.budget > 0 and len(self.running) < self._max_num_seqs:
            queue = self._next_queue()
            request = queue.peek() if queue is not None else None
            if queue is None or request is None:
                break
            if not self.kv_cache_manager.can_ever_hold(request.num_tokens):
                self._end_for_size(request)
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
            if request.num_output_tokens == 0:  # one that moved here from a dead core has been counted
                num_prompt = request.num_prompt_tokens
                request.prefill_stats = PrefillStats(num_prompt, min(num_cached, num_prompt))
        plan.entering.append(request)
        plan.add(request, num_new)
        return True

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
        logprobs, drafts = runner_output.logprobs, scheduler_output.drafts
        requests, token_ids = self.requests, runner_output.sampled_token_ids
        for row, request_id in enumerate(runner_output.req_ids):
            request = requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            token_id = token_ids[row]
            stopped = request.append_output_token(token_id)
            if request_id in drafts:
                following = runner_output.further_token_ids.get(request_id, [])
                stopped = self._take_in_draft(request, len(drafts[request_id]), following, stopped, outputs)
                if stopped:
                    has_ended = True
                    self._end_run(request)
                continue
            if request.use_structured_output and not stopped:
                stopped = not self._grammars.accept(request, token_id)
            if request.num_logprobs is not None and logprobs is not None:
                outputs.add(request, [token_id], row_of(logprobs, row, request.num_logprobs))
            elif stopped or request.events or request.prefill_stats is not None or request.generation:
                outputs.add(request, [token_id])
            else:
                outputs.add_token(request, token_id)
            if stopped:
                has_ended = True
                self._end_run(request)
        if has_ended:
            self._drop_ended_from_running()
        return outputs.build(self.make_stats() if self._log_stats else None)

    def _take_in_draft(
        self, request: Request, num_drafted: int, following: list[int], stopped: bool, outputs: StepOutputs
    ) -> bool:
        """The tokens `following` the one just appended, as far as the request goes; whether it has ended."""
        assert self._proposer is not None
        self._proposer.record(request, num_drafted, len(following))
        new_token_ids = request.token_ids[-1:]
        for token_id in following:
            if stopped:
                break
            stopped = request.append_output_token(token_id)
            new_token_ids.append(token_id)
        request.num_computed_tokens = request.num_tokens - 1
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        outputs.add(request, new_token_ids)
        return stopped

    def make_stats(self) -> SchedulerStats:
        stats = super().make_stats()
        if self._proposer is not None:
            stats.spec_decoding_stats = self._proposer.take_stats()
        return stats

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
            if request is not None and request.status is RequestStatus.RUNNING:
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
