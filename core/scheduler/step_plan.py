"""One step while it is being planned: what is in it so far and how much of the token budget is left."""

from collections.abc import Sequence

import numpy as np

from ...protocol.multimodal import MultiModalFeatureSpec
from ..kv_cache.kv_cache_manager import KVCacheManager
from .request import Request
from .runner_messages import NewRequestData, SchedulerOutput


class StepPlan:
    """Filled by the scheduler in batch order: running requests, then those that enter; then turned into its output."""

    __slots__ = ("budget", "entering", "constrained", "num_tokens", "new_blocks", "drafts", "has_preempted", "encoding")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens
        self.entering: list[Request] = []
        self.constrained: list[Request] = []  # by a grammar
        self.num_tokens: dict[int, int] = {}  # by row, as all below
        self.new_blocks: dict[int, list[list[int]]] = {}  # ids by KV group
        self.drafts: dict[int, Sequence[int]] = {}
        self.has_preempted = False
        self.encoding: dict[str, MultiModalFeatureSpec] = {}  # items to be encoded, by identifier

    def add(self, request: Request, num_tokens: int) -> None:
        """These tokens of the request count as computed from here on."""
        self.num_tokens[request.row] = num_tokens
        request.num_computed_tokens += num_tokens
        self.budget -= num_tokens
        if request.use_structured_output:
            self.constrained.append(request)

    def add_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        """What a running request was given, by KV group."""
        former = self.new_blocks.get(row)
        if former is not None:
            block_ids = [[*first, *then] for first, then in zip(former, block_ids, strict=True)]
        self.new_blocks[row] = block_ids

    def drop(self, request: Request) -> None:
        """Take a running request out again, if it is in the plan, and its tokens back into the budget."""
        num_tokens = self.num_tokens.pop(request.row, None)
        if num_tokens is not None:
            request.num_computed_tokens -= num_tokens
            self.budget += num_tokens
            self.new_blocks.pop(request.row, None)
            self.drafts.pop(request.row, None)
            if request.use_structured_output:
                self.constrained.remove(request)

    def to_output(self, removed_rows: list[int], kv_cache_manager: KVCacheManager) -> SchedulerOutput:
        """What the runner is told."""
        num_reqs = len(self.num_tokens)
        num_tokens = np.fromiter(self.num_tokens.values(), np.int64, num_reqs)
        return SchedulerOutput(
            scheduled_new_reqs=[
                _new_request_data(request, self.num_tokens[request.row], kv_cache_manager.block_ids(request.request_id))
                for request in self.entering
            ],
            removed_rows=removed_rows,
            rows=np.fromiter(self.num_tokens, np.int64, num_reqs),
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
