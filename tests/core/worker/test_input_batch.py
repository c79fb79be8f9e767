"""The batch's arrays: steps that go on equal steps put together anew; rows and their blocks."""

import dataclasses
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from corespan.core.scheduler.runner_messages import NewRequestData
from corespan.core.worker.input_batch import InputBatch, StepInputs
from corespan.protocol.resolved_sampling import ResolvedSampling

BLOCK_SIZE = 4
NUM_ROWS = 8
MAX_MODEL_LEN = 64


class Batch:
    """An `InputBatch` under requests whose tokens are random. `anew`: it puts every step together from the start."""

    def __init__(self, anew: bool) -> None:
        self.batch = InputBatch(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, num_groups=2)
        self.anew = anew
        self.num_blocks = 0
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, int] = {}

    def add(self, row: int, token_ids: list[int]) -> None:
        self.computed[row] = self.blocks[row] = 0
        self.batch.add(NewRequestData(row, token_ids, len(token_ids), ResolvedSampling(), 0, [[], []], 0))

    def remove(self, row: int) -> None:
        del self.computed[row]
        self.batch.remove(row)

    def step(self, chunks: dict[int, int], sampled: int) -> StepInputs:
        """A copy of the step's inputs; every request that samples gets the token `sampled`."""
        for row, count in chunks.items():
            self.computed[row] += count
            while self.blocks[row] * BLOCK_SIZE < self.computed[row]:
                self.num_blocks += 1
                self.blocks[row] += 1
                self.batch.append_blocks(row, [[self.num_blocks], [self.num_blocks + 1000]])
        if self.anew:  # a request that comes and goes ends whatever went on
            self.add(NUM_ROWS - 1, [1])
            self.remove(NUM_ROWS - 1)
        inputs = self.batch.prepare(np.array(list(chunks)), np.array(list(chunks.values())))
        inputs.sampled = np.full(len(inputs.sampling_rows), sampled)
        copy = deepcopy(inputs)
        for group, blocks in zip(copy.metadata, blocks_of(inputs), strict=True):
            group.block_table = torch.tensor(blocks)
        return copy


def blocks_of(inputs: StepInputs) -> list[list[list[int]]]:
    """What attention reads: by group, for each request as many blocks as the longest has."""
    used = -(-inputs.metadata[0].max_seq_len // BLOCK_SIZE)
    return [group.block_table[group.table_rows, :used].tolist() for group in inputs.metadata]


def assert_equal(found: StepInputs, expected: StepInputs) -> None:
    pairs: list[tuple[Any, Any]] = [(found, expected), *zip(found.metadata, expected.metadata, strict=True)]
    for one, other in pairs:
        for field in dataclasses.fields(one):
            value, wanted = getattr(one, field.name), getattr(other, field.name)
            if isinstance(value, (np.ndarray, torch.Tensor)):
                np.testing.assert_array_equal(value, wanted, err_msg=field.name)
            elif field.name != "metadata":
                assert value == wanted, field.name


def test_steps_that_go_on_equal_steps_that_are_put_together_anew() -> None:
    chance = np.random.default_rng(3)
    batches = [Batch(anew=False), Batch(anew=True)]
    lengths: dict[int, int] = {}  # tokens of each request so far, by row
    num_continued = 0
    for _ in range(600):
        if len(lengths) < 6 and chance.random() < 0.1:
            row = min(set(range(NUM_ROWS)) - lengths.keys())
            token_ids = chance.integers(0, 300, chance.integers(1, 12)).tolist()
            lengths[row] = len(token_ids)
            for batch in batches:
                batch.add(row, token_ids)
        for row in [row for row, length in lengths.items() if length == MAX_MODEL_LEN or chance.random() < 0.005]:
            del lengths[row]
            for batch in batches:
                batch.remove(row)
        left_out = {row for row in lengths if chance.random() < 0.01}
        computed = batches[0].computed
        chunks = {
            row: min(length - computed[row], int(chance.integers(1, 8)))
            for row, length in lengths.items()
            if row not in left_out
        }
        if not chunks:
            continue
        before = batches[0].batch._step
        token_id = int(chance.integers(0, 300))
        found, expected = (batch.step(chunks, token_id) for batch in batches)
        assert_equal(found, expected)
        num_continued += batches[0].batch._step is before
        for row in found.sampling_rows.tolist():
            lengths[row] += 1
    assert num_continued > 200


def test_a_row_taken_again_names_no_block_of_its_former_request() -> None:
    batch = InputBatch(2, MAX_MODEL_LEN, BLOCK_SIZE)
    batch.add(NewRequestData(0, [1] * 12, 12, ResolvedSampling(), 0, [[7, 8, 9]], 0))
    batch.remove(0)
    batch.add(NewRequestData(0, [1], 1, ResolvedSampling(), 0, [[5]], 0))
    batch.add(NewRequestData(1, [1] * 12, 12, ResolvedSampling(), 0, [[1, 2, 3]], 0))
    inputs = batch.prepare(np.array([0, 1]), np.array([1, 12]))
    assert blocks_of(inputs) == [[[5, 0, 0], [1, 2, 3]]]


def test_each_group_has_its_own_blocks_and_slots() -> None:
    batch = InputBatch(2, MAX_MODEL_LEN, BLOCK_SIZE, num_groups=2)
    batch.add(NewRequestData(0, [1] * 10, 10, ResolvedSampling(), 0, [[1, 2, 3], [0, 4]], 6))
    batch.append_blocks(0, [[], [5]])
    inputs = batch.prepare(np.array([0]), np.array([4]))
    assert blocks_of(inputs) == [[[1, 2, 3]], [[0, 4, 5]]]
    first, second = inputs.metadata
    assert first.slot_mapping.tolist() == [10, 11, 12, 13]
    assert second.slot_mapping.tolist() == [18, 19, 20, 21]
    assert first.positions is second.positions
