"""What decides a request's random choices, and how one with `n > 1` answers is fanned out."""

import copy
import random
from dataclasses import dataclass

import msgspec

from ...protocol.requests import EngineCoreRequest
from ..outputs.parent_request import ParentRequest

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
    parent: ParentRequest | None
    index: int


def fan_out(request: EngineCoreRequest) -> list[Child]:
    """The requests to send for `request`: itself, or one for each of its n answers."""
    if request.sampling_params.n == 1:
        return [Child(request, None, 0)]
    parent = ParentRequest(request)
    return [Child(_child_request(request, index), parent, index) for index in range(parent.n)]


def _child_request(request: EngineCoreRequest, index: int) -> EngineCoreRequest:
    """The request for answer `index`, 0 .. n - 1: with the seed plus `index`, and the prompt that all share, so that
    the prefix cache computes it once.
    """
    params = copy.copy(request.sampling_params)
    params.n = 1
    if params.seed is not None:
        params.seed = (params.seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2  # stays a signed 64-bit integer
    return msgspec.structs.replace(
        request,
        request_id=f"{index}_{request.request_id}",
        sampling_params=params,
        noise_seed=(request.noise_seed + index) % _SEEDS,
    )
