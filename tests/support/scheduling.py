"""A scheduler with a fake model behind it, for tests.

The fake model's keys and values are real enough to catch a wrong block: what it stores for a position depends on what
it finds stored for the position before, and its next token on what is stored for the last one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from corespan.core.kv_cache.block_hash import BlockHasher
from corespan.core.kv_cache.block_pool import KVCacheBlock
from corespan.core.kv_cache.groups import FullAttention, LayerKind
from corespan.core.scheduler.request import Request
from corespan.core.scheduler.runner_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from corespan.core.scheduler.scheduler import Scheduler
from corespan.protocol.config import CacheConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig
from corespan.protocol.outputs import EngineCoreOutput, FinishReason
from corespan.protocol.params import SamplingParams
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import resolved

VOCAB_SIZE = 50


def make_vllm_config(
    block_size: int = 16, enable_prefix_caching: bool = True, max_loras: int | None = None, **scheduler: Any
) -> VllmConfig:
    adapters = {} if max_loras is None else {"max_loras": max_loras, "max_cpu_loras": max_loras}
    scheduler = {"max_num_batched_tokens": 1024, "max_num_seqs": 64, "max_model_len": 512} | scheduler
    return VllmConfig(
        model_config=ModelConfig(
            model="/nowhere",
            served_model_name="fake",
            tokenizer=None,
            hf_config={"vocab_size": VOCAB_SIZE},
            max_model_len=scheduler["max_model_len"],
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        scheduler_config=SchedulerConfig(**scheduler),
        lora_config=LoRAConfig(lora_dtype="bfloat16", **adapters) if adapters else None,
    )


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % VOCAB_SIZE for i in range(length)]


def greedy(max_tokens: int | None = 8, ignore_eos: bool = True, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, **fields)


def stored_after(stored_before: int, token_id: int) -> int:
    """What the fake model stores for a position."""
    return (stored_before * 1_000_003 + token_id + 1) % (2**61 - 1)


def stored_for(token_ids: Iterable[int]) -> int:
    stored = 0
    for token_id in token_ids:
        stored = stored_after(stored, token_id)
    return stored


def in_group(stored: int, group: int) -> int:
    """As a KV group's own blocks hold it, and back."""
    return stored ^ group << 61


def next_token(stored: int, noise_seed: int, position: int) -> int:
    return (stored ^ (noise_seed * 7919 + position * 104729)) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], noise_seed: int = 0, count: int = 8) -> list[int]:
    """What the fake model says when nothing interferes."""
    token_ids, stored = list(prompt), stored_for(prompt)
    for _ in range(count):
        token_ids.append(next_token(stored, noise_seed, len(token_ids)))
        stored = stored_after(stored, token_ids[-1])
    return token_ids[len(prompt) :]


class _BatchRow:
    def __init__(self, new: NewRequestData) -> None:
        self.token_ids = new.token_ids.copy()
        self.block_ids = [[*ids] for ids in new.block_ids]
        self.noise_seed = new.noise_seed
        self.num_computed = new.num_computed_tokens
        self._stored: list[int] = []

    def stored_for(self, position: int) -> int:
        """What should be stored there."""
        for token_id in self.token_ids[len(self._stored) : position + 1]:
            self._stored.append(stored_after(self._stored[-1] if self._stored else 0, token_id))
        return self._stored[position]


class FakeRunner:
    """Keeps a batch from the scheduler's deltas, like the real one, and checks what it is told.

    The rows in `fail_next` fail in the next step they are scheduled in, before anything of theirs is stored.
    """

    def __init__(self, block_size: int, kv_groups: Sequence[LayerKind] = (FullAttention(),)) -> None:
        self.block_size = block_size
        self.kv_groups = kv_groups
        self.stored: dict[tuple[int, int], int] = {}  # (block id, offset) -> what is stored there
        self.batch: dict[int, _BatchRow] = {}
        self.fail_next: set[int] = set()

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for number in step.removed_rows:
            del self.batch[number]
        self._take_deltas(step)
        assert step.num_scheduled_tokens.sum() == step.total_num_scheduled_tokens
        failed: dict[int, str] = {}
        sampled: dict[int, int] = {}
        written: set[tuple[int, int]] = set()
        for number, num_tokens in zip(step.rows.tolist(), step.num_scheduled_tokens.tolist(), strict=True):
            assert num_tokens > 0
            row = self.batch[number]
            start, row.num_computed = row.num_computed, row.num_computed + num_tokens
            if number in self.fail_next:
                self.fail_next.discard(number)
                failed[number] = "made to fail"
                continue
            self._compute(row, start, start + num_tokens, written)
            if start + num_tokens == len(row.token_ids):
                token_id = next_token(self._read(row, len(row.token_ids)), row.noise_seed, len(row.token_ids))
                row.token_ids.append(token_id)
                sampled[number] = token_id
        rows, token_ids = np.array(list(sampled), np.int64), np.array(list(sampled.values()), np.int64)
        return ModelRunnerOutput(rows, token_ids, failed=failed)

    def _take_deltas(self, step: SchedulerOutput) -> None:
        for number, block_ids in step.new_block_ids.items():
            for known, new_ids in zip(self.batch[number].block_ids, block_ids, strict=True):
                known += new_ids
        for new in step.scheduled_new_reqs:
            assert new.row not in self.batch
            self.batch[new.row] = _BatchRow(new)

    def _compute(self, row: _BatchRow, start: int, end: int, written: set[tuple[int, int]]) -> None:
        assert end <= len(row.token_ids)
        for position in range(start, end):
            before = self._read(row, position) if position else 0
            for group in range(len(self.kv_groups)):
                slot = self._slot(row, group, position)
                assert slot not in written, "two requests, or groups, write to one slot"
                assert slot[0] != 0, "somebody writes to the null block"
                written.add(slot)
                self.stored[slot] = in_group(stored_after(before, row.token_ids[position]), group)

    def _read(self, row: _BatchRow, position: int) -> int:
        """What is stored for the position before; junk if that, or the first position it attends to, is wrong in any
        group."""
        found = {self._stored(row, group, position - 1) for group in range(len(self.kv_groups))}
        for group, kind in enumerate(self.kv_groups):
            first = kind.first_read(position)
            if self._stored(row, group, first) != row.stored_for(first):
                return -1
        return found.pop() if len(found) == 1 else -1

    def _stored(self, row: _BatchRow, group: int, position: int) -> int:
        return in_group(self.stored.get(self._slot(row, group, position), -1), group)

    def _slot(self, row: _BatchRow, group: int, position: int) -> tuple[int, int]:
        return row.block_ids[group][position // self.block_size], position % self.block_size


@dataclass
class Step:
    """What the scheduler planned, by request id."""

    entered: dict[str, NewRequestData]
    removed: set[str]
    num_scheduled_tokens: dict[str, int]
    structured: list[str]
    grammar_bitmask: np.ndarray | None


class Harness:
    """A scheduler and a fake runner, stepped by hand; keeps every output."""

    def __init__(
        self,
        num_blocks: int = 100,
        log_stats: bool = True,
        manager: Any = None,
        kv_groups: Sequence[LayerKind] = (FullAttention(),),
        **config: Any,
    ) -> None:
        self.config = make_vllm_config(**config)
        self.scheduler = Scheduler(self.config, num_blocks, manager, log_stats=log_stats, kv_groups=kv_groups)
        self.block_size = self.config.cache_config.block_size
        self.hasher = BlockHasher(self.block_size) if self.config.cache_config.enable_prefix_caching else None
        self.runner = FakeRunner(self.block_size, kv_groups)
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.steps: list[Step] = []
        self.num_computed: Counter[str] = Counter()  # tokens, by request
        self._ids: dict[int, str] = {}  # by row
        self._names: dict[tuple[int, int], str] = {}  # by client and handle
        self._fail_next: set[str] = set()

    def request(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams | None = None, **fields: Any
    ) -> Request:
        fields.setdefault("handle", len(self._names) + 1)  # without one, no token is plain
        self._names[fields.get("client_index", 0), fields["handle"]] = request_id
        message = EngineCoreRequest(
            request_id, list(prompt), resolved(greedy() if params is None else params), **fields
        )
        return Request.from_engine_core_request(message, self.hasher)

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams | None = None, **fields: Any
    ) -> Request:
        request = self.request(request_id, prompt, params, **fields)
        self.scheduler.add_request(request)
        return request

    def fail_next(self, request_id: str) -> None:
        """Have the request fail in the next step it is scheduled in."""
        self._fail_next.add(request_id)

    def schedule(self) -> SchedulerOutput:
        """The first half of a step; `steps` has it by request id."""
        planned = self.scheduler.schedule()
        removed = {self._ids.pop(row) for row in planned.removed_rows}
        running = self.scheduler.table.running
        self._ids.update((new.row, running[new.row].request_id) for new in planned.scheduled_new_reqs)
        counts = zip(planned.rows.tolist(), planned.num_scheduled_tokens.tolist(), strict=True)
        scheduled = {self._ids[row]: count for row, count in counts}
        self.num_computed.update(scheduled)
        failing = [row for row in planned.rows.tolist() if self._ids[row] in self._fail_next]
        self.runner.fail_next.update(failing)
        self._fail_next.difference_update(self._ids[row] for row in failing)
        self.steps.append(
            Step(
                {self._ids[new.row]: new for new in planned.scheduled_new_reqs},
                removed,
                scheduled,
                [self._ids[row] for row in planned.structured_rows],
                planned.grammar_bitmask,
            )
        )
        return planned

    def step(self) -> Step:
        """One whole step."""
        planned = self.schedule()
        self.take(planned, self.runner.execute_model(planned))
        return self.steps[-1]

    def take(self, planned: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for client, frame in self.scheduler.update_from_output(planned, output).items():
            for handle, token_id in zip(frame.handles, frame.token_ids, strict=True):
                name = self._names[client, handle]
                self.outputs.setdefault(name, []).append(EngineCoreOutput(name, [token_id], handle=handle))
            for one in frame.outputs:
                self.outputs.setdefault(one.request_id, []).append(one)

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for output in self.outputs.get(request_id, []) for token_id in output.new_token_ids]

    def finish_reason(self, request_id: str) -> FinishReason | None:
        outputs = self.outputs.get(request_id)
        return outputs[-1].finish_reason if outputs else None

    def num_cached_tokens(self, request_id: str) -> int:
        """What the shell was told about the request's prompt."""
        (stats,) = [o.prefill_stats for o in self.outputs[request_id] if o.prefill_stats is not None]
        return stats.num_cached_tokens

    def num_preemptions(self) -> int:
        return sum(
            event.type == 3 for outputs in self.outputs.values() for output in outputs for event in output.events or ()
        )


def in_order_of_reuse(blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
    """Those of the blocks that are in the free list, in its order."""
    links = {block.prev_free: block for block in blocks if block.prev_free is not None}
    found = [block for before, block in links.items() if before.block_id == -1]
    while found and found[-1] in links:
        found.append(links[found[-1]])
    return found


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is accounted for, and every live request is in one place."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    holders = [set(group.blocks) for group in manager.groups]
    running = {request.request_id for request in scheduler.table.running.values()}
    assert all(ids == running for ids in holders)
    users = Counter(block.block_id for group in manager.groups for blocks in group.blocks.values() for block in blocks)
    users[0] += 1  # the pool itself
    free = [block.block_id for block in in_order_of_reuse(pool.blocks)]
    assert len(free) == len(set(free)) == pool.num_free_blocks
    for block in pool.blocks:
        assert block.ref_cnt == users[block.block_id]
        assert (block.block_id in set(free)) == (block.ref_cnt == 0)
        if block.block_hash is not None:
            assert pool.get_cached_block(block.block_hash) is block
    assert sum(block.block_hash is not None for block in pool.blocks) == len(pool.block_by_hash)
    places = Counter(request.request_id for request in scheduler.table.running.values())
    for queue in (scheduler.table.waiting, scheduler.table.preempted):
        places.update(request.request_id for request in queue)
    assert set(places.values()) <= {1}
    assert set(places) <= set(scheduler.table.requests)
