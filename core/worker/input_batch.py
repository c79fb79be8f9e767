"""The persistent batch: every request's tokens and blocks in arrays, one row a request; a step brings only what is new.

The model runner owns it and asks it for each step's inputs."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.interface import AttentionMetadata
from ..scheduler.output import CachedRequestData, NewRequestData


@dataclass(slots=True)
class StepInputs:
    """One step, requests ordered as the model sees them: those with a single token first, then by row.

    rows: [num_reqs] int64, batch rows; token_ids: [num_tokens] int32; sampling: positions in `rows` of the requests all
    of whose tokens are computed after this step, [n] int64.
    """

    rows: np.ndarray
    token_ids: torch.Tensor
    metadata: AttentionMetadata
    starts: np.ndarray
    sampling: np.ndarray


class InputBatch:
    """Rows are given lowest first and kept until `remove`; `row_of` finds a request's. Arrays are indexed by row:

    token_ids [max_num_reqs, max_model_len] int32; block_table [max_num_reqs, max_blocks] int32;
    num_tokens, num_prompt_tokens, num_computed, num_blocks [max_num_reqs] int64.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.row_of: dict[str, int] = {}
        self.req_ids = [""] * max_num_reqs
        self.token_ids = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((max_num_reqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_blocks = np.zeros(max_num_reqs, dtype=np.int64)
        self.prompt_embeds: dict[int, torch.Tensor] = {}  # [num_prompt_tokens, hidden_size], by row
        self.prompt_logprobs: dict[int, int] = {}  # k, by row
        self._free_rows = list(range(max_num_reqs))

    def add(self, request: NewRequestData) -> int:
        """Give the request a row and return it."""
        row = heapq.heappop(self._free_rows)
        self.row_of[request.req_id] = row
        self.req_ids[row] = request.req_id
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = len(request.token_ids)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed[row] = request.num_computed_tokens
        self.num_blocks[row] = 0
        self.append_blocks(row, request.block_ids)
        if request.prompt_embeds is not None:
            self.prompt_embeds[row] = torch.from_numpy(np.array(request.prompt_embeds))
        if request.sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = request.sampling_params.prompt_logprobs
        return row

    def remove(self, req_id: str) -> int | None:
        """Free the request's row and return it; None if the request has none."""
        row = self.row_of.pop(req_id, None)
        if row is None:
            return None
        self.prompt_embeds.pop(row, None)
        self.prompt_logprobs.pop(row, None)
        heapq.heappush(self._free_rows, row)
        return row

    def append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)

    def update(self, cached: CachedRequestData) -> None:
        """Take in new blocks and progress of requests that are in the batch already."""
        if not cached.req_ids:
            return
        rows = [self.row_of[req_id] for req_id in cached.req_ids]
        self.num_computed[rows] = cached.num_computed_tokens
        for row, block_ids in zip(rows, cached.new_block_ids, strict=True):
            if block_ids:
                self.append_blocks(row, block_ids)

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """One sampled token for each of `rows`; a token past the last place is the request's last and is not kept."""
        fits = self.num_tokens[rows] < self.token_ids.shape[1]
        if not fits.all():
            rows, token_ids = rows[fits], token_ids[fits]
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def prepare(self, num_scheduled: dict[str, int]) -> StepInputs:
        """The inputs of a step that computes so many tokens of each request; every one of them has a row."""
        num_reqs = len(num_scheduled)
        rows = np.fromiter(map(self.row_of.__getitem__, num_scheduled), np.int64, num_reqs)
        lengths = np.fromiter(num_scheduled.values(), np.int64, num_reqs)
        order = np.lexsort((rows, lengths > 1))
        rows, lengths = rows[order], lengths[order]
        computed = self.num_computed[rows]
        seq_lens = computed + lengths
        starts = np.zeros(num_reqs + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        num_tokens, max_query_len = int(starts[-1]), int(lengths.max())
        if max_query_len == 1:
            token_rows, positions = rows, computed
        else:
            token_rows = np.repeat(rows, lengths)
            positions = np.arange(num_tokens) + np.repeat(computed - starts[:-1], lengths)
        max_seq_len = int(seq_lens.max())
        blocks = self.block_table[token_rows, positions // self.block_size].astype(np.int64)
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(starts.astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            block_table=torch.from_numpy(self.block_table[rows, : -(-max_seq_len // self.block_size)]),
            slot_mapping=torch.from_numpy(blocks * self.block_size + positions % self.block_size),
            positions=torch.from_numpy(positions),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_decodes=int((lengths == 1).sum()),
        )
        return StepInputs(
            rows=rows,
            token_ids=torch.from_numpy(self.token_ids[token_rows, positions]),
            metadata=metadata,
            starts=starts,
            sampling=np.flatnonzero(seq_lens >= self.num_tokens[rows]),
        )
