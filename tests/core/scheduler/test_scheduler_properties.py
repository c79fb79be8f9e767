"""Whatever requests come, go, fail or are preempted, every one gets the tokens it would get alone."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import Harness, Step, check_blocks, expected_tokens, greedy, in_group, stored_for

from corespan.core.kv_cache.groups import FullAttention, KVCacheConfig, LayerKind, SlidingWindow
from corespan.core.scheduler.request import Request, RequestStatus
from corespan.protocol.outputs import FinishReason

BLOCK_SIZE = 4
KV_GROUPS: list[tuple[LayerKind, ...]] = [
    (FullAttention(),),
    (SlidingWindow(7),),
    (SlidingWindow(5), FullAttention(), SlidingWindow(5)),
    (FullAttention(), SlidingWindow(2), SlidingWindow(13)),
]
MAX_MODEL_LEN = 48
LONGEST = MAX_MODEL_LEN // BLOCK_SIZE  # blocks of the longest request

prompts = st.builds(
    lambda stem, tail: [(5 * i) % 7 for i in range(stem)] + tail,  # many share the beginning
    st.integers(0, 24),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        kv_groups=st.sampled_from(KV_GROUPS),
        spare_blocks=st.integers(1, 2 * LONGEST),
        budget=st.sampled_from([8, 11, 40, 400]),
        threshold=st.sampled_from([0, 0, 5]),
        max_num_seqs=st.integers(1, 8),
    )
    def start(
        self,
        policy: str,
        caching: bool,
        kv_groups: tuple[LayerKind, ...],
        spare_blocks: int,
        budget: int,
        threshold: int,
        max_num_seqs: int,
    ) -> None:
        self.max_step = min(budget, threshold or budget)
        needed = KVCacheConfig(kv_groups, BLOCK_SIZE, self.max_step).blocks_for(MAX_MODEL_LEN)
        self.h = Harness(
            num_blocks=needed + spare_blocks,
            kv_groups=kv_groups,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            policy=policy,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=threshold,
        )
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.known: dict[str, tuple[list[int], int, int, list[int]]] = {}
        self.dropped: set[str] = set()
        self.all_requests: list[Request] = []
        self.chains: dict[bytes, int] = {}

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 30),
        seed=st.integers(0, 3),
        priority=st.integers(-1, 1),
        resumed=st.integers(0, 5),
    )
    def add(self, prompt: list[int], max_tokens: int, seed: int, priority: int, resumed: int) -> None:
        request_id = f"r{len(self.known)}"
        count = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        before = expected_tokens(prompt, seed, min(resumed, count - 1))
        request = self.h.add(
            request_id,
            prompt,
            greedy(max_tokens),
            noise_seed=seed,
            priority=priority,
            arrival_time=float(len(self.known)),
            output_token_ids=before,
        )
        self.known[request_id] = (prompt, seed, count, before)
        self.all_requests.append(request)
        assert request.status is RequestStatus.WAITING

    @rule()
    def step(self) -> None:
        planned = self.h.schedule()
        assert planned.total_num_scheduled_tokens <= self.budget
        assert len(self.h.scheduler.table.running) <= self.max_num_seqs
        self.check_order(self.h.steps[-1])
        self.h.take(planned, self.h.runner.execute_model(planned))

    def check_order(self, step: Step) -> None:
        """Nobody enters before one who waits and whose turn was earlier; nobody enters while others give way."""
        table = self.h.scheduler.table
        entered = [table.order_key(table.requests[request_id]) for request_id in step.entered]
        waiting = [table.order_key(request) for request in (*table.waiting, *table.preempted)]
        assert entered == sorted(entered)
        assert not entered or not waiting or entered[-1] < min(waiting)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.known)))
        live = request_id in self.h.scheduler.table.requests
        assert self.h.scheduler.finish_requests([request_id]) == ([(request_id, 0)] if live else [])
        if live:
            self.dropped.add(request_id)

    @precondition(lambda self: self.h.scheduler.table.running)
    @rule(data=st.data())
    def abort_while_the_model_runs(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([r.request_id for r in self.h.scheduler.table.running.values()]))
        planned = self.h.schedule()
        output = self.h.runner.execute_model(planned)
        if self.h.scheduler.finish_requests([request_id]):
            self.dropped.add(request_id)
        self.h.take(planned, output)

    @precondition(lambda self: self.h.scheduler.table.requests)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.h.scheduler.table.requests)))
        self.h.fail_next(request_id)

    @rule(running_too=st.booleans())
    def reset_prefix_cache(self, running_too: bool) -> None:
        idle = not self.h.scheduler.table.running
        assert self.h.scheduler.reset_prefix_cache(running_too) == (running_too or idle)

    @invariant()
    def all_blocks_are_accounted_for(self) -> None:
        check_blocks(self.h.scheduler)

    @invariant()
    def blocks_behind_a_window_are_given_back(self) -> None:
        manager = self.h.scheduler.kv_cache_manager
        for request in self.h.scheduler.table.running.values():
            known = max(0, request.num_computed_tokens - self.max_step - BLOCK_SIZE)  # at the last look, or before
            for kind, group in zip(manager.config.kinds, manager.groups, strict=True):
                behind = group.blocks[request.request_id][: kind.first_read(known) // BLOCK_SIZE]
                assert all(block is manager.block_pool.null_block for block in behind)

    @invariant()
    def cached_blocks_hold_what_their_hash_says(self) -> None:
        for request in self.all_requests:
            for index, block_hash in enumerate(request.block_hashes):
                if block_hash not in self.chains:
                    self.chains[block_hash] = stored_for(request.token_ids[: (index + 1) * BLOCK_SIZE])
        for block in self.h.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                block_hash, group = block.block_hash[:-1], block.block_hash[-1]
                stored = in_group(self.h.runner.stored[block.block_id, BLOCK_SIZE - 1], group)
                assert stored == self.chains[block_hash]

    @invariant()
    def tokens_are_those_of_a_request_alone(self) -> None:
        for request_id, (prompt, seed, count, before) in self.known.items():
            tokens = before + self.h.tokens(request_id)
            assert tokens == expected_tokens(prompt, seed, count)[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.run()
        self.all_blocks_are_accounted_for()
        self.tokens_are_those_of_a_request_alone()
        assert not self.h.scheduler.table.requests
        assert self.h.scheduler.kv_cache_manager.usage == 0
        for request_id, (_, _, count, before) in self.known.items():
            reason = self.h.finish_reason(request_id)
            if request_id in self.dropped:
                assert reason is None
            elif reason is not FinishReason.ERROR:
                assert reason is FinishReason.LENGTH
                assert len(before) + len(self.h.tokens(request_id)) == count


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestScheduler.pytestmark = [pytest.mark.timeout(120)]
