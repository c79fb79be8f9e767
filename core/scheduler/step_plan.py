"""One step while it is being planned: what is in it so far and how much of the token budget is left."""

from collections.abc import Sequence

from ..kv_cache.kv_cache_manager import KVCacheManager
from .request import Request
from .runner_messages import NewRequestData, SchedulerOutput


class StepPlan:
    """Filled by the scheduler in batch order: running requests, then those that enter; then turned into its output."""

    __slots__ = ("budget", "entering", "constrained", "num_tokens", "new_blocks", "drafts", "has_preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens
        self.entering: list[Request] = []
        self.constrained: list[Request] = []  # by a grammar
        self.num_tokens: dict[str, int] = {}
        self.new_blocks: dict[str, list[list[int]]] = {}  # ids by KV group
        self.drafts: dict[str, Sequence[int]] = {}
        self.has_preempted = False

    def add(self, request: Request, num_tokens: int) -> None:
        """These tokens of the request count as computed from here on."""
        request.num_computed_tokens += num_tokens
        self.num_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens
        if request.use_structured_output:
            self.constrained.append(request)

    def add_blocks(self, request_id: str, block_ids: list[list[int]]) -> None:
        """What a running request was given, by KV group."""
        former = self.new_blocks.get(request_id)
        if former is not None:
            block_ids = [[*first, *then] for first, then in zip(former, block_ids, strict=True)]
        self.new_blocks[request_id] = block_ids

    def drop(self, request: Request) -> None:
        """Take a running request out again, if it is in the plan, and its tokens back into the budget."""
        num_tokens = self.num_tokens.pop(request.request_id, None)
        if num_tokens is not None:
            request.num_computed_tokens -= num_tokens
            self.budget += num_tokens
            self.new_blocks.pop(request.request_id, None)
            self.drafts.pop(request.request_id, None)
            if request.use_structured_output:
                self.constrained.remove(request)

    def to_output(self, removed_req_ids: set[str], kv_cache_manager: KVCacheManager) -> SchedulerOutput:
        """What the runner is told."""
        return SchedulerOutput(
            scheduled_new_reqs=[
                _new_request_data(
                    request, self.num_tokens[request.request_id], kv_cache_manager.block_ids(request.request_id)
                )
                for request in self.entering
            ],
            new_block_ids=self.new_blocks,
            num_scheduled_tokens=self.num_tokens,
            total_num_scheduled_tokens=sum(self.num_tokens.values()),
            removed_req_ids=removed_req_ids,
            drafts=self.drafts,
        )


def _new_request_data(request: Request, num_scheduled: int, block_ids: list[list[int]]) -> NewRequestData:
    return NewRequestData(
        req_id=request.request_id,
        token_ids=request.token_ids.copy(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        noise_seed=request.noise_seed,
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens - num_scheduled,
        prompt_embeds=request.prompt_embeds,
    )
