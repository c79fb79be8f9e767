"""Pictures on the scheduler's side: a chunk of a prompt runs once the embeddings that it takes in are there. The
embeddings themselves lie in the worker (`core/multimodal/encoder.py`)."""

from ...protocol.multimodal import MultiModalFeatureSpec
from .request import Request
from .runner_messages import SchedulerOutput
from .step_plan import StepPlan


class EncoderGate:
    """Room for `capacity` embeddings, which is also how many are computed in a step at most. A request holds an item
    from the first chunk that takes it in to the step that computes its last token; what nobody holds stays until its
    room is wanted, oldest first. No item is larger than the capacity, so whoever holds one can go on, and give it back.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sizes: dict[str, int] = {}  # of all items that are there, by identifier
        self._holders: dict[str, set[str]] = {}  # request ids
        self._idle: dict[str, None] = {}  # items that nobody holds, in the order in which they were given back
        self._dropped: list[str] = []  # since the last step
        self._num_embeds = 0
        self._taking: list[Request] = []  # requests that take items in, in the step being planned

    def cut(self, request: Request, start: int, num_new: int, plan: StepPlan) -> int:
        """How many of `num_new` tokens from `start` on can be computed in this step; has encoded what they take in.

        A chunk ends before the first item for which there is no room left, in the cache or in the step.
        """
        for feature in request.mm_features:
            position = feature.mm_position
            if position.end <= start:
                continue
            if position.offset >= start + num_new:
                break
            if not self._hold(request.request_id, feature) and not self._encode(request.request_id, feature, plan):
                num_new = max(position.offset - start, 0)
                break
        if num_new:
            self._taking.append(request)
        return num_new

    def to_output(self, output: SchedulerOutput) -> None:
        output.encoder_dropped, self._dropped = self._dropped, []

    def step_done(self) -> None:
        """The step has been computed: give back the items that it has passed."""
        for request in self._taking:
            for feature in request.mm_features:
                if feature.mm_position.end <= request.num_computed_tokens:
                    self._give_back(request.request_id, feature)
        self._taking.clear()

    def release(self, request: Request) -> None:
        """It ends, or has to begin anew."""
        for feature in request.mm_features:
            self._give_back(request.request_id, feature)

    def reset(self) -> None:
        """Drop all that nobody holds."""
        for identifier in list(self._idle):
            self._drop(identifier)

    def _hold(self, request_id: str, feature: MultiModalFeatureSpec) -> bool:
        identifier = feature.identifier
        if identifier not in self._sizes:
            return False
        self._idle.pop(identifier, None)
        self._holders.setdefault(identifier, set()).add(request_id)
        return True

    def _encode(self, request_id: str, feature: MultiModalFeatureSpec, plan: StepPlan) -> bool:
        """Plan the item's encoding, if there is room for it."""
        size = feature.mm_position.num_embeds
        planned = sum(each.mm_position.num_embeds for each in plan.encoding.values())
        idle = sum(self._sizes[identifier] for identifier in self._idle)
        if max(planned, self._num_embeds - idle) + size > self._capacity:
            return False
        while self._num_embeds + size > self._capacity:
            self._drop(next(iter(self._idle)))
        for identifier in plan.encoding.keys() - self._sizes.keys():  # of a request that was preempted meanwhile
            del plan.encoding[identifier]
        plan.encoding[feature.identifier] = feature
        self._sizes[feature.identifier] = size
        self._num_embeds += size
        return self._hold(request_id, feature)

    def _give_back(self, request_id: str, feature: MultiModalFeatureSpec) -> None:
        holders = self._holders.get(feature.identifier, set())
        if request_id in holders:
            holders.remove(request_id)
            if not holders:
                del self._holders[feature.identifier]
                self._idle[feature.identifier] = None

    def _drop(self, identifier: str) -> None:
        del self._idle[identifier]
        self._num_embeds -= self._sizes.pop(identifier)
        self._dropped.append(identifier)
