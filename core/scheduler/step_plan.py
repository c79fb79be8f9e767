"""One step while it is being planned: what is in it so far and how much of the token budget is left."""

from collections.abc import Sequence

import numpy as np

from ...protocol.multimodal import MultiModalFeatureSpec
from ..kv_cache.kv_cache_manager import KVCacheManager
from .request import Request
from .request_table import RequestTable
from .runner_messages import NewRequestData, SchedulerOutput
from .steady_rows import SteadyRows


class StepPlan:
    """Filled by the scheduler in batch order: running requests, then those that enter; then turned into its output.

    num_tokens: [max_num_seqs] int64, by row; 0: not in the plan.
    """

    __slots__ = ("budget", "entering", "constrained", "num_tokens", "new_blocks", "drafts", "has_preempted", "encoding")

    def __init__(self, budget: int, max_num_seqs: int) -> None:
        self.budget = budget  # tokens
        self.entering: list[Request] = []
        self.constrained: list[Request] = []  # by a grammar
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.new_blocks: dict[int, list[list[int]]] = {}  # by row: ids by KV group
        self.drafts: dict[int, Sequence[int]] = {}  # by row
        self.has_preempted = False
        self.encoding: dict[str, MultiModalFeatureSpec] = {}  # items to be encoded, by identifier

    def add(self, request: Request, num_tokens: int) -> None:
        """These tokens of the request count as computed from here on."""
        self.num_tokens[request.row] = num_tokens
        request.num_computed_tokens += num_tokens
        self.budget -= num_tokens
        if request.use_structured_output:
            self.constrained.append(request)

    def add_steady(self, rows: np.ndarray, steady: SteadyRows) -> None:
        """A token of each, as far as the budget goes. rows: [n] int64, requests in steady decode."""
        rows = rows[: self.budget]
        self.num_tokens[rows] = 1
        self.budget -= len(rows)
        steady.plan(rows)

    def add_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        """What a running request was given, by KV group."""
        former = self.new_blocks.get(row)
        if former is not None:
            block_ids = [[*first, *then] for first, then in zip(former, block_ids, strict=True)]
        self.new_blocks[row] = block_ids

    def drop(self, request: Request) -> None:
        """Take a running request out again, if it is in the plan, and its tokens back into the budget."""
        num_tokens = int(self.num_tokens[request.row])
        if num_tokens:
            self.num_tokens[request.row] = 0
            request.num_computed_tokens -= num_tokens
            self.budget += num_tokens
            self.new_blocks.pop(request.row, None)
            self.drafts.pop(request.row, None)
            if request.use_structured_output:
                self.constrained.remove(request)

    def to_output(self, table: RequestTable, kv_cache_manager: KVCacheManager) -> SchedulerOutput:
        """What the runner is told."""
        rows = table.running_rows()
        num_tokens = self.num_tokens[rows]
        if not num_tokens.all():
            rows, num_tokens = rows[num_tokens > 0], num_tokens[num_tokens > 0]
        return SchedulerOutput(
            scheduled_new_reqs=[
                _new_request_data(
                    request, int(self.num_tokens[request.row]), kv_cache_manager.block_ids(request.request_id)
                )
                for request in self.entering
            ],
            removed_rows=table.take_removed(),
            rows=rows,
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=int(num_tokens.sum()),
            new_block_ids=self.new_blocks,
            drafts=self.drafts,
            encoder_inputs={name: feature.data or {} for name, feature in self.encoding.items()},
        )


def _new_request_data(request: Request, num_scheduled: int, block_ids: list[list[int]]) -> NewRequestData:
    return NewRequestData(
        row=request.row,
        token_ids=request.token_ids.copy(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        noise_seed=request.noise_seed,
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens - num_scheduled,
        prompt_embeds=request.prompt_embeds,
        adapter=request.adapter,
        mm_features=request.mm_features,
        pooling=request.pooling,
    )
