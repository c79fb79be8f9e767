"""One request with `n > 1` answers: its children in the core, and their way back into one stream of outputs."""

import copy
import random
from dataclasses import dataclass

import msgspec

from ..protocol.params import RequestOutputKind
from ..protocol.requests import EngineCoreRequest
from .outputs import CompletionOutput

_SEEDS = 2**64


class NoiseSeeds:
    """What decides each request's random choices: the caller's seed, or the next of the engine's own.

    Those follow from the engine's seed: engines that have the same get the same ones in the order of their requests.
    None: at random. `client_index` tells apart the several engines that share a core, and their seed.
    """

    def __init__(self, engine_seed: int | None, client_index: int = 0) -> None:
        self._own = random.Random(None if engine_seed is None else f"{engine_seed} {client_index}")

    def of(self, seed: int | None) -> int:
        """0 .. 2**64 - 1."""
        return self._own.getrandbits(64) if seed is None else seed % _SEEDS


@dataclass(frozen=True, slots=True)
class Child:
    """A request as the core sees it. `parent` is None for a request with one answer."""

    request: EngineCoreRequest
    parent: "ParentRequest | None"
    index: int


def fan_out(request: EngineCoreRequest) -> list[Child]:
    """The requests to send for `request`: itself, or one for each of its n answers."""
    if request.sampling_params.n == 1:
        return [Child(request, None, 0)]
    parent = ParentRequest(request)
    return [Child(parent.child_request(index), parent, index) for index in range(parent.n)]


class ParentRequest:
    """Fans `request` out into children with one answer each; known to the output processor until the last has ended.

    Child i has the seed plus i; all share the prompt, so the prefix cache computes it once.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.n = request.sampling_params.n
        self.child_ids: set[str] = set()  # running ones
        self.num_finished = 0
        self.max_num_generation_tokens = 0
        final_only = request.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
        self._collected: list[CompletionOutput] | None = [] if final_only else None

    @property
    def finished(self) -> bool:
        return self.num_finished == self.n

    def child_request(self, index: int) -> EngineCoreRequest:
        """The request for answer `index`, 0 .. n - 1."""
        params = copy.copy(self.request.sampling_params)
        params.n = 1
        if params.seed is not None:
            params.seed = (params.seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2  # stays a signed 64-bit integer
        return msgspec.structs.replace(
            self.request,
            request_id=f"{index}_{self.request_id}",
            sampling_params=params,
            noise_seed=(self.request.noise_seed + index) % _SEEDS,
        )

    def finish_child(self, child_id: str, num_generation_tokens: int) -> None:
        self.child_ids.discard(child_id)
        self.num_finished += 1
        self.max_num_generation_tokens = max(self.max_num_generation_tokens, num_generation_tokens)

    def collect(self, output: CompletionOutput) -> list[CompletionOutput]:
        """What to hand out now that a child has `output`: itself, or at the end all of them in order of index."""
        if self._collected is None:
            return [output]
        self._collected.append(output)
        if not self.finished:
            return []
        return sorted(self._collected, key=lambda collected: collected.index)
