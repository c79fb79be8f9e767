"""Decides at each step which tokens of which requests are computed, and takes in what came of it.

Owned by `EngineCore`, called by its busy loop only: `schedule()`, then the model, then `update_from_output()`, which
belongs to every `schedule()`, also to one that planned nothing.
"""

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from ...protocol.config import VllmConfig
from ...protocol.outputs import EngineCoreOutputs, PrefillStats, SchedulerStats
from ..kv_cache.groups import FullAttention, KVCacheConfig, LayerKind
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..speculation.ngram import MAX_STEP_TOKENS, NgramProposer
from .adapter_gate import AdapterGate
from .encoder_gate import EncoderGate
from .grammar_gate import GrammarGate, GrammarManager
from .pause import PauseState
from .request import Request, RequestStatus
from .request_table import RequestTable
from .runner_messages import ModelRunnerOutput, SchedulerOutput
from .shell_outputs import ShellOutputs, row_of
from .step_plan import StepPlan

logger = logging.getLogger("corespan.core")


class Scheduler:
    """The policy: the order of requests, the token budget, and who gets blocks. `table` says where each request stands.

    Every request just tries to get all its tokens computed, prompt or output alike. Running requests come first, in
    the order in which they started; then waiting ones enter, each with room for all its tokens so far, so a prompt that
    is computed in chunks never has to give way for want of blocks it had been promised. When a running request finds no
    free block, the one that started last (fcfs) or matters least (priority) is preempted: its blocks are freed and its
    tokens computed again later.

    Only running requests hold blocks.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        num_gpu_blocks: int,
        structured_output_manager: GrammarManager | None = None,
        log_stats: bool = False,
        kv_groups: Sequence[LayerKind] = (FullAttention(),),
    ) -> None:
        config, cache_config = vllm_config.scheduler_config, vllm_config.cache_config
        self._max_model_len = config.max_model_len
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._chunked_prefill = config.enable_chunked_prefill
        self._long_prefill_token_threshold = config.long_prefill_token_threshold
        self._policy = config.policy
        self._block_size = cache_config.block_size
        self._log_stats = log_stats
        self.table = RequestTable(config.policy, config.max_num_seqs, self._block_size, log_events=log_stats)
        self.kv_cache_manager = KVCacheManager(
            KVCacheConfig.of(vllm_config, kv_groups), num_gpu_blocks, cache_config.enable_prefix_caching
        )
        self.pause_state = PauseState.UNPAUSED
        self._grammars = GrammarGate(structured_output_manager)
        self._proposer = NgramProposer.for_engine(vllm_config)
        lora_config = vllm_config.lora_config
        self._adapters: AdapterGate | None = None
        if lora_config is not None:
            self._adapters = AdapterGate(self.table, lora_config.max_loras, patience=config.max_num_seqs)
        mm_config = vllm_config.mm_config
        self._encoder = None if mm_config is None else EncoderGate(mm_config.encoder_capacity)
        self._num_preemptions = 0  # since the last statistics

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request, or a further piece of prompt for a resumable one that is known by its id.

        Raises ValueError for an id in use and for a prompt that leaves no room for a token.
        """
        known = self.table.requests.get(request.request_id)
        if known is not None and known.resumable:
            self._extend_session(known, request)
            return
        if known is not None:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.num_prompt_tokens >= self._max_model_len and request.pooling is None:
            raise ValueError(
                f"the prompt has {request.num_prompt_tokens} tokens; with max_model_len {self._max_model_len} "
                f"it may have at most {self._max_model_len - 1}"
            )
        if request.num_tokens > self._max_model_len:
            raise ValueError(f"the request brings {request.num_tokens} tokens; max_model_len is {self._max_model_len}")
        request.limit_length(self._max_model_len)
        self.table.add(request)
        self._finish_if_complete(request)

    def finish_requests(
        self, request_ids: Iterable[str] | None, status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> list[tuple[str, int]]:
        """End these requests, None: all of them, without an output. Their blocks are free at once.

        Returns (request id, client index) of those that were live; other ids are ignored.
        """
        finished = []
        requests = self.table.requests
        for request_id in list(requests) if request_ids is None else request_ids:
            request = requests.get(request_id)
            if request is not None:
                self.table.finish(request, status)
                self._free(request)
                finished.append((request_id, request.client_index))
        return finished

    def _free(self, request: Request) -> None:
        """It holds nothing any more."""
        self.kv_cache_manager.free(request.request_id)
        if self._encoder is not None:
            self._encoder.release(request)

    def has_requests(self) -> bool:
        """Whether a step has anything to do, be it only to pass on what has ended."""
        return self.table.has_news or self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests that steps can bring forward in the present pause state."""
        table = self.table
        if self.pause_state is PauseState.PAUSED_ALL:
            return 0
        started = len(table.running) + len(table.preempted)
        if self.pause_state is PauseState.PAUSED_NEW:
            return started
        return started + len(table.waiting) + len(table.compiling)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting) requests, whatever the pause state."""
        num_running = len(self.table.running)
        return num_running, len(self.table.requests) - num_running

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached content. False, and nothing done, while a request holds blocks.

        With `reset_running_requests` those that run are preempted first and compute everything again.
        """
        if reset_running_requests:
            for request in reversed(tuple(self.table.running.values())):
                self._preempt(request)
        if self.kv_cache_manager.reset_prefix_cache():
            return True
        logger.warning("the prefix cache was not reset: %d requests hold blocks of it", len(self.table.running))
        return False

    def reset_encoder_cache(self) -> None:
        """Forget the embeddings of pictures that no running request needs."""
        if self._encoder is not None:
            self._encoder.reset()

    def make_stats(self) -> SchedulerStats:
        """The present state, and the counts since the last call."""
        num_running, num_waiting = self.get_request_counts()
        stats = SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_skipped_waiting_reqs=len(self.table.compiling) + len(self.table.idle_sessions),
            kv_cache_usage=self.kv_cache_manager.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_stats=self.kv_cache_manager.take_stats(),
            spec_decoding_stats=None if self._proposer is None else self._proposer.take_stats(),
            running_lora_adapters=[] if self._adapters is None else self._adapters.names(running=True),
            waiting_lora_adapters=[] if self._adapters is None else self._adapters.names(running=False),
        )
        self._num_preemptions = 0
        return stats

    # A step, first half

    def schedule(self) -> SchedulerOutput:
        """Plan a step. It may be empty."""
        budget = 0 if self.pause_state is PauseState.PAUSED_ALL else self._max_num_batched_tokens
        plan = StepPlan(budget, self._max_num_seqs)
        if self.table.compiling:
            self._queue_compiled()
        self._schedule_running(plan)
        if not plan.has_preempted:
            self._schedule_waiting(plan)
        output = plan.to_output(self.table, self.kv_cache_manager)
        if plan.constrained:
            self._grammars.constrain(output, plan.constrained)
        if self._encoder is not None:
            self._encoder.to_output(output)
        return output

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar is ready by now; end those whose grammar failed."""
        ready, failed = self._grammars.poll(self.table.compiling.values())
        for request in ready:
            self.table.grammar_ready(request)
        for request, error in failed:
            self.table.finish_unseen(request, RequestStatus.FINISHED_ERROR, error)

    def _schedule_running(self, plan: StepPlan) -> None:
        """Most of them in passing (`SteadyRows`); one by one those for which there is more to be done."""
        steady, running, block_size = self.table.steady, self.table.running, self._block_size
        drafts_fit = self._proposer is not None and len(running) < MAX_STEP_TOKENS
        may_wait = self._encoder is not None
        rows = self.table.running_rows()
        passed = 0
        for place in [*np.flatnonzero(~steady.undisturbed(rows)).tolist(), len(rows)]:
            if place > passed:  # requests may have been preempted in favour of another one just now
                between = rows[passed:place]
                plan.add_steady(steady.still_here(between) if plan.has_preempted else between, steady)
            passed = place + 1
            if plan.budget <= 0 or place == len(rows):
                break
            request = running.get(int(rows[place]))
            if request is None:
                continue
            num_new = len(request.token_ids) - request.num_computed_tokens
            if num_new != 1 or may_wait:
                num_new = self._chunk(request, request.num_computed_tokens, num_new, plan)
                if num_new == 0:
                    continue
            end = request.num_computed_tokens + num_new
            # Decode fast path: allocate only where this token starts a block, hash only where it completes one.
            if (end % block_size <= 1 or num_new > 1) and not self._take_blocks(request, end, plan):
                continue
            if drafts_fit and num_new == 1:
                num_new += self._add_draft(request, end, plan)
            plan.add(request, num_new)

    def _chunk(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> int:
        """How many of these tokens from `start` on the step takes; 0 when it has no room and they may not be split, or
        the first is of a picture that has to wait."""
        if 0 < self._long_prefill_token_threshold < num_tokens:
            num_tokens = self._long_prefill_token_threshold
        if num_tokens > plan.budget:
            num_tokens = plan.budget if self._chunked_prefill else 0
        if self._encoder is not None and start < request.num_prompt_tokens:
            return self._encoder.cut(request, start, num_tokens, plan)
        return num_tokens

    def _take_blocks(self, request: Request, end: int, plan: StepPlan) -> bool:
        """See to the blocks of a running request's tokens from the first that is not computed up to `end`.

        False when there were too few even after preempting others, and the request itself had to go.
        """
        start, block_size = request.num_computed_tokens, self._block_size
        is_chunk = end - start > 1
        if is_chunk or start % block_size == 0:
            while (new_blocks := self.kv_cache_manager.extend(request.request_id, start, end)) is None:
                victim = self._preemption_victim()
                plan.drop(victim)
                plan.has_preempted = True
                self._preempt(victim)
                if victim is request:
                    return False
            if new_blocks:
                plan.new_blocks[request.row] = new_blocks
        if is_chunk or end % block_size == 0:
            self._cache_blocks(request, end)
        return True

    def _cache_blocks(self, request: Request, end: int) -> None:
        """Let the blocks be found that are full once the request's first `end` tokens are computed."""
        request.extend_block_hashes()
        self.kv_cache_manager.cache_blocks(request.request_id, request.block_hashes, end)

    def _preemption_victim(self) -> Request:
        running = self.table.running.values()
        return next(reversed(running)) if self._policy == "fcfs" else max(running, key=self.table.order_key)

    def _preempt(self, request: Request) -> None:
        """Take everything computed from a running request and let it wait for its turn to come again."""
        self.kv_cache_manager.revoke(request.request_id)
        self._free(request)
        request.reset_progress()
        self.table.preempt(request)
        self._num_preemptions += 1

    def _add_draft(self, request: Request, end: int, plan: StepPlan) -> int:
        """Put a draft behind the request's last token, if one is at hand and costs nobody anything; its length."""
        assert self._proposer is not None
        num_running = len(self.table.running)
        num_planned = self._max_num_batched_tokens - plan.budget
        room = min(MAX_STEP_TOKENS - max(num_running, num_planned + 1), plan.budget - 1)
        draft = self._proposer.propose(request, room)
        if not draft:
            return 0
        new_blocks = self.kv_cache_manager.extend(
            request.request_id, request.num_computed_tokens, end + len(draft), watermark=num_running
        )
        if new_blocks is None:
            return 0
        if new_blocks:
            plan.add_blocks(request.row, new_blocks)
        plan.drafts[request.row] = draft
        return len(draft)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        gate = self._adapters
        if gate is not None:
            gate.open()
        while plan.budget > 0 and len(self.table.running) < self._max_num_seqs:
            request = self._next_waiting()
            if request is None:
                break
            if not self.kv_cache_manager.can_ever_hold(request.num_tokens):
                self._reject_too_large(request)
            elif gate is not None and not gate.admits(request):
                self.table.set_aside(request)
            elif not self._admit(request, plan):
                break
            elif gate is not None:
                gate.entered(request)

    def _next_waiting(self) -> Request | None:
        """Whose turn it is to enter: preempted requests have started and may go on while new ones are held."""
        preempted = self.table.preempted.peek()
        if self.pause_state is not PauseState.UNPAUSED:
            return preempted
        candidates = [request for request in (preempted, self.table.waiting.peek()) if request is not None]
        return min(candidates, key=self.table.order_key, default=None)

    def _reject_too_large(self, request: Request) -> None:
        """No cache of this size can hold it: it would wait for ever, and hold up all behind it."""
        capacity = self.kv_cache_manager.longest_request(request.num_tokens)
        message = f"the request needs room for {request.num_tokens} tokens; the whole KV cache holds {capacity}"
        self.table.finish_unseen(request, RequestStatus.FINISHED_ERROR, message)

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Start a request and put it into the plan; False when the blocks or the budget do not suffice."""
        request.extend_block_hashes()
        hashes = () if request.skip_reading_prefix_cache else request.block_hashes
        prefix = self.kv_cache_manager.find_prefix(hashes, request.num_tokens)
        num_cached = prefix.num_tokens
        num_new = self._chunk(request, num_cached, request.num_tokens - num_cached, plan)
        if num_new == 0:
            return False
        # Watermark: one free block per running request, so that admission does not cause an immediate preemption.
        watermark = len(self.table.running)
        if not self.kv_cache_manager.admit(request.request_id, request.num_tokens, prefix, watermark):
            if self._encoder is not None:
                self._encoder.release(request)
            return False
        self.kv_cache_manager.cache_blocks(request.request_id, request.block_hashes, num_cached + num_new)
        request.num_computed_tokens = num_cached
        if request.status is not RequestStatus.PREEMPTED:
            self.kv_cache_manager.record_lookup(request.num_tokens, num_cached)
            if request.num_output_tokens == 0:  # one that moved here from a dead core has been counted
                num_prompt = request.num_prompt_tokens
                request.prefill_stats = PrefillStats(num_prompt, min(num_cached, num_prompt))
        self.table.start(request)
        plan.entering.append(request)
        plan.add(request, num_new)
        return True

    # A step, second half

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the step's tokens. The shell's messages, by client index.

        Requests that were finished or preempted since `schedule()` are passed over.
        """
        outputs = ShellOutputs()
        if runner_output.failed:
            self._fail(scheduler_output, runner_output.failed)
        self.kv_cache_manager.commit()
        if self._encoder is not None:
            self._encoder.step_done()
        for finished in self.table.take_finished_unseen():
            outputs.add(finished, [])
        if runner_output.prompt_logprobs:
            self._keep_prompt_logprobs(runner_output)
        if runner_output.pooled:
            self._finish_pooled(runner_output.pooled, outputs)
        logprobs, drafts = runner_output.logprobs, scheduler_output.drafts
        running, steady = self.table.running, self.table.steady
        rows, token_ids = runner_output.rows, runner_output.sampled_token_ids
        plain = steady.take_in(rows, token_ids)
        for client_index, handles, plain_token_ids in steady.by_client(rows[plain], token_ids[plain]):
            outputs.add_plain(client_index, handles, plain_token_ids)
        for line in np.flatnonzero(~plain).tolist():
            request, token_id = running.get(int(rows[line])), int(token_ids[line])
            if request is None:
                continue
            request.leave_steady()
            stopped = request.append_output_token(token_id)
            if drafts and request.row in drafts:
                following = runner_output.further_token_ids.get(request.row, [])
                stopped = self._take_in_draft(request, len(drafts[request.row]), following, stopped, outputs)
            elif stopped or request.has_news:
                if request.use_structured_output and not stopped:
                    stopped = self._grammars.accept(request, token_id)
                k = request.num_logprobs
                own_logprobs = None if logprobs is None or k is None else row_of(logprobs, line, k)
                outputs.add(request, [token_id], own_logprobs)
            else:
                outputs.add_plain(request.client_index, [request.handle], [token_id])
            if stopped:
                self._finish_running(request)
            elif self._proposer is None:
                request.enter_steady(steady)
        return outputs.build(self.make_stats() if self._log_stats else None)

    def _take_in_draft(
        self, request: Request, num_drafted: int, following: list[int], stopped: bool, outputs: ShellOutputs
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
        self._cache_blocks(request, request.num_computed_tokens)
        outputs.add(request, new_token_ids)
        return stopped

    def _finish_pooled(self, vectors: dict[int, np.ndarray], outputs: ShellOutputs) -> None:
        """vectors: by row. Those of requests that were aborted meanwhile go nowhere."""
        for row, own in vectors.items():
            if (request := self.table.running.get(row)) is not None:
                request.status = RequestStatus.FINISHED_STOPPED
                outputs.add(request, [], pooling_output=own)
                self._finish_running(request)

    def _keep_prompt_logprobs(self, runner_output: ModelRunnerOutput) -> None:
        """They are sent whole, with the request's first token."""
        for row, chunk in runner_output.prompt_logprobs.items():
            request = self.table.running.get(row)
            if request is not None and not request.prompt_logprobs_sent:
                request.prompt_logprobs.append(chunk)

    def _fail(self, scheduler_output: SchedulerOutput, failed: dict[int, str]) -> None:
        """End the requests that failed in the runner, and nobody else.

        What they should have written in this step is not there. A request that shares such blocks (it entered in this
        very step) has computed with junk: it is preempted, and its token is passed over and sampled again.
        """
        scheduled = self.table.removed | self.table.running  # those that were aborted meanwhile, too
        void_ids: set[int] = set()
        for row, error in failed.items():
            request = scheduled[row]
            void_ids.update(self.kv_cache_manager.revoke(request.request_id))
            if request.status is RequestStatus.RUNNING:
                self._free(request)
                self.table.finish_unseen(request, RequestStatus.FINISHED_ERROR, error)
        if not void_ids:
            return
        for row in scheduler_output.rows.tolist():  # whoever shares comes later in the batch
            request = scheduled[row]
            if request.status is not RequestStatus.RUNNING:
                void_ids.update(self.kv_cache_manager.revoke(request.request_id))
            elif self.kv_cache_manager.holds_any(request.request_id, void_ids):
                void_ids.update(self.kv_cache_manager.revoke(request.request_id))
                self._preempt(request)

    # The end of a run

    def _finish_running(self, request: Request) -> None:
        """A running request has its last token; an open session waits for more prompt instead of finishing."""
        self._free(request)
        if not request.resumable or request.status is RequestStatus.FINISHED_ERROR:
            self.table.finish(request, request.status)
            return
        self.table.park(request)
        if request.pending_prompts:
            self._extend_session(request, request.pending_prompts.popleft())

    def _extend_session(self, request: Request, piece: Request) -> None:
        """More prompt for an open session; a piece that is not resumable closes it."""
        if request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            request.pending_prompts.append(piece)
        elif not piece.resumable:
            self.table.finish(request, RequestStatus.FINISHED_ABORTED)
        else:
            request.continue_with(piece)
            self.table.enqueue(request)
            self._finish_if_complete(request)

    def _finish_if_complete(self, request: Request) -> None:
        """A request that arrives with all the tokens it may have finishes without running."""
        if request.has_all_tokens:
            self.table.finish_unseen(request, RequestStatus.FINISHED_LENGTH_CAPPED, None)
