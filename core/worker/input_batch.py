"""The persistent batch: every request's tokens and blocks in arrays, one row a request; a step brings only what is new.

The model runner owns it and asks it for each step's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...protocol.multimodal import MultiModalFeatureSpec
from ..attention.interface import AttentionMetadata, StepMetadata
from ..kernels.memory import as_buffer
from ..lazy_torch import torch
from ..lora.adapter import Adapter, AdapterRows
from ..scheduler.runner_messages import NewRequestData

NO_DRAFTS: Mapping[int, Sequence[int]] = {}


@dataclass(slots=True)
class StepInputs:
    """One step, requests ordered as the model sees them: those with a single token first, then by row.

    rows: [num_reqs] int64, batch rows; token_ids, positions: [num_tokens] int64; slot_mapping: [num_groups, num_tokens]
    int64; seq_lens: [num_reqs] int32; starts: [num_reqs + 1] int64, each request's first token. Of the requests all of
    whose tokens are computed after this step: sampling_rows [n] int64; output_rows [n] int64, their last tokens;
    sampled [n] int64, what the model runner sampled for them. A request with a draft has a line for each of its tokens.
    `metadata` holds these arrays. `adapters`: with the tokens of each that are its own.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    seq_lens: np.ndarray
    slot_mapping: np.ndarray
    starts: np.ndarray
    sampling_rows: np.ndarray
    output_rows: np.ndarray
    metadata: StepMetadata
    sampled: np.ndarray
    adapters: Sequence[AdapterRows] = ()


class InputBatch:
    """A request keeps the row that the scheduler gave it until `remove`. Arrays are indexed by row:

    token_ids [max_num_reqs, max_model_len + 1] int32; num_tokens (when it was added), num_prompt_tokens, num_computed
    [max_num_reqs] int64; by KV group before that: block_table [num_groups, max_num_reqs, max_blocks] int32, num_blocks
    [num_groups, max_num_reqs] int64.

    While the batch is unchanged, decode steps update the arrays of the last step in place; what came of them is entered
    by row, in `token_ids` and `num_computed`, when anything else happens.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_reqs, max_model_len + 1), dtype=np.int32)
        self.block_table = np.zeros((num_groups, max_num_reqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._block_tables = list(as_buffer(self.block_table))  # by group, over the same memory
        self.num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_blocks = np.zeros((num_groups, max_num_reqs), dtype=np.int64)
        self.prompt_embeds: dict[int, torch.Tensor] = {}  # [num_prompt_tokens, hidden_size], by row
        self.mm_features: dict[int, Sequence[MultiModalFeatureSpec]] = {}  # by row, until the prompt is computed
        self.prompt_logprobs: dict[int, int] = {}  # k, by row
        self.adapters: dict[int, Adapter] = {}  # by row
        self._step: StepInputs | None = None  # the last one, while its outcome is not entered
        self._decoded_rows = np.empty(0, dtype=np.int64)  # in that step, in the scheduler's order, if it may go on
        self._steps_in_blocks = 0  # steps left, that one included, before any request crosses a block boundary

    def add(self, request: NewRequestData, adapter: Adapter | None = None) -> None:
        self._enter_outcome()
        row = request.row
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = len(request.token_ids)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed[row] = request.num_computed_tokens
        self.num_blocks[:, row] = 0
        self.block_table[:, row] = 0
        self.append_blocks(row, request.block_ids)
        if request.prompt_embeds is not None:
            self.prompt_embeds[row] = torch.from_numpy(np.array(request.prompt_embeds))
        if request.mm_features:
            self.mm_features[row] = request.mm_features
        if request.sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = request.sampling_params.prompt_logprobs
        if adapter is not None:
            self.adapters[row] = adapter

    def remove(self, row: int) -> None:
        """The row's request leaves, if there is one."""
        self._enter_outcome()
        self.prompt_embeds.pop(row, None)
        self.mm_features.pop(row, None)
        self.prompt_logprobs.pop(row, None)
        self.adapters.pop(row, None)

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """block_ids: by KV group. Blocks that were given back keep their entries, which are not read any more."""
        for group, new_ids in enumerate(block_ids):
            start = self.num_blocks[group, row]
            self.block_table[group, row, start : start + len(new_ids)] = new_ids
            self.num_blocks[group, row] += len(new_ids)

    def prepare(
        self, rows: np.ndarray, lengths: np.ndarray, drafts: Mapping[int, Sequence[int]] = NO_DRAFTS
    ) -> StepInputs:
        """The inputs of a step that computes so many tokens of each row's request. rows, lengths: [num_reqs] int64. The
        last of a request's tokens may be a draft; then every token from the one before it on is sampled behind.

        They are the last step's, brought up to date, where the same requests go on by the token they sampled.
        """
        step, all_decode = self._step, int(lengths.sum()) == len(rows)
        if step is not None and all_decode and np.array_equal(rows, self._decoded_rows):
            self._continue(step)
            return step
        self._enter_outcome()
        self._step = step = self._begin(rows, lengths, drafts)
        self._decoded_rows = rows if all_decode and len(step.sampling_rows) == len(rows) else rows[:0]
        return step

    def _begin(self, rows: np.ndarray, lengths: np.ndarray, drafts: Mapping[int, Sequence[int]]) -> StepInputs:
        num_reqs = len(rows)
        order = np.argsort(rows + (lengths > 1) * len(self.num_tokens))  # those with a single token first
        rows, lengths = rows[order], lengths[order]
        for row, draft in drafts.items():
            first = self.num_computed[row] + 1
            self.token_ids[row, first : first + len(draft)] = draft
        computed = self.num_computed[rows]
        seq_lens = (computed + lengths).astype(np.int32)
        starts = np.zeros(num_reqs + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        num_tokens = int(starts[-1])
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(num_tokens) + np.repeat(computed - starts[:-1], lengths)
        slot_mapping = np.empty((len(self.block_table), num_tokens), dtype=np.int64)
        token_ids = self.token_ids[token_rows, positions].astype(np.int64)
        sampling = np.flatnonzero(seq_lens >= self.num_tokens[rows])
        output_rows = starts[1:][sampling] - 1
        if drafts:
            drafted = [len(drafts.get(row, ())) for row in rows[sampling].tolist()]
            output_rows = np.concatenate(
                [np.arange(at - n, at + 1) for at, n in zip(output_rows, drafted, strict=True)]
            )
            sampling = np.repeat(sampling, np.add(drafted, 1))
        first_group = AttentionMetadata(
            query_start_loc=as_buffer(starts.astype(np.int32)),
            seq_lens=as_buffer(seq_lens),
            block_table=self._block_tables[0],
            table_rows=as_buffer(rows),
            slot_mapping=as_buffer(slot_mapping[0]),
            positions=as_buffer(positions),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_decodes=int((lengths == 1).sum()),
        )
        others = (
            replace(first_group, block_table=table, slot_mapping=as_buffer(slots))
            for table, slots in zip(self._block_tables[1:], slot_mapping[1:], strict=True)
        )
        step = StepInputs(
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            seq_lens=seq_lens,
            slot_mapping=slot_mapping,
            starts=starts,
            sampling_rows=rows[sampling],
            output_rows=output_rows,
            metadata=(first_group, *others),
            sampled=np.zeros(len(sampling), dtype=np.int64),
            adapters=self._adapter_rows(token_rows) if self.adapters else (),
        )
        self._find_blocks(step, token_rows)
        return step

    def _adapter_rows(self, token_rows: np.ndarray) -> list[AdapterRows]:
        """token_rows: [num_tokens] int64."""
        rows_of: dict[Adapter, list[int]] = {}
        for row, adapter in self.adapters.items():
            rows_of.setdefault(adapter, []).append(row)
        tokens = [(adapter, np.flatnonzero(np.isin(token_rows, rows))) for adapter, rows in rows_of.items()]
        return [(adapter, torch.from_numpy(own)) for adapter, own in tokens if len(own)]

    def _continue(self, step: StepInputs) -> None:
        step.token_ids[:] = step.sampled
        step.positions += 1
        step.seq_lens += 1
        for group in step.metadata:
            group.max_seq_len += 1
        self._steps_in_blocks -= 1
        if self._steps_in_blocks:
            step.slot_mapping += 1
        else:
            self._find_blocks(step, step.rows)

    def _find_blocks(self, step: StepInputs, token_rows: np.ndarray) -> None:
        """token_rows: [num_tokens] int64."""
        blocks, offsets = np.divmod(step.positions, self.block_size)
        step.slot_mapping[:] = self.block_table[:, token_rows, blocks]
        step.slot_mapping *= self.block_size
        step.slot_mapping += offsets
        self._steps_in_blocks = self.block_size - int(offsets.max())

    def enter_drafted(self, step: StepInputs, lines: np.ndarray) -> None:
        """Enter what came of a step with drafts, of whose sampled tokens only `lines`, [n] int64, are kept."""
        self._step = None
        dropped = np.delete(np.arange(len(step.sampling_rows)), lines)
        self.num_computed[step.rows] = step.seq_lens
        np.subtract.at(self.num_computed, step.sampling_rows[dropped], 1)
        self.token_ids[step.sampling_rows[lines], step.positions[step.output_rows[lines]] + 1] = step.sampled[lines]

    def _enter_outcome(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self.num_computed[step.rows] = step.seq_lens
            self.token_ids[step.sampling_rows, step.positions[step.output_rows] + 1] = step.sampled
