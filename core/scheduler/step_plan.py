"""One step while it is being planned: what is in it so far and how much of the token budget is left."""

from .output import CachedRequestData, NewRequestData, SchedulerOutput
from .request import Request

_NO_BLOCKS: list[int] = []


class StepPlan:
    """Filled by the scheduler in batch order: running requests, then those that enter; then turned into its output."""

    __slots__ = ("budget", "running", "entering", "num_tokens", "new_blocks", "has_preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens
        self.running: list[Request] = []
        self.entering: list[Request] = []
        self.num_tokens: dict[str, int] = {}
        self.new_blocks: dict[str, list[int]] = {}
        self.has_preempted = False

    def requests(self) -> list[Request]:
        """All that are in the plan, in the order of the batch."""
        return self.running + self.entering

    def drop(self, request: Request) -> None:
        """Take a running request out again, if it is in the plan, and its tokens back into the budget."""
        num_tokens = self.num_tokens.pop(request.request_id, None)
        if num_tokens is not None:
            self.budget += num_tokens
            self.running.remove(request)
            self.new_blocks.pop(request.request_id, None)

    def commit(self, removed_req_ids: set[str]) -> SchedulerOutput:
        """What the runner is told. From here on the step's tokens count as computed."""
        running, num_tokens, new_blocks = self.running, self.num_tokens, self.new_blocks
        cached = CachedRequestData(
            req_ids=[request.request_id for request in running],
            new_block_ids=[new_blocks.get(request.request_id, _NO_BLOCKS) for request in running]
            if new_blocks
            else [_NO_BLOCKS] * len(running),
            num_computed_tokens=[request.num_computed_tokens for request in running],
        )
        new_requests = [_new_request_data(request) for request in self.entering]
        for request in running:
            request.num_computed_tokens += num_tokens[request.request_id]
        for request in self.entering:
            request.num_computed_tokens += num_tokens[request.request_id]
        return SchedulerOutput(
            scheduled_new_reqs=new_requests,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            removed_req_ids=removed_req_ids,
        )


def _new_request_data(request: Request) -> NewRequestData:
    return NewRequestData(
        req_id=request.request_id,
        token_ids=request.token_ids.copy(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        noise_seed=request.noise_seed,
        block_ids=[block.block_id for block in request.blocks],
        num_computed_tokens=request.num_computed_tokens,
        prompt_embeds=request.prompt_embeds,
    )
