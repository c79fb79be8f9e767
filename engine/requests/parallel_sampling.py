"""What decides a request's random choices, and how one with `n > 1` answers is fanned out."""

import random

import msgspec

from ...protocol.requests import EngineCoreRequest
from ...protocol.resolved_sampling import ResolvedSampling

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


def fan_out(request: EngineCoreRequest, n: int) -> list[EngineCoreRequest]:
    """What to send for `request`: itself, or one for each of its `n` answers.

    Child i has the noise seed plus i; all share the prompt, so the prefix cache computes it once.
    """
    return [request] if n == 1 else [_child(request, index) for index in range(n)]


def _child(request: EngineCoreRequest, index: int) -> EngineCoreRequest:
    params = request.params
    assert isinstance(params, ResolvedSampling)
    shown = params.for_processors
    if shown is not None:
        seed = shown.seed
        if seed is not None:
            seed = (seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2  # stays a signed 64-bit integer
        params = msgspec.structs.replace(params, for_processors=msgspec.structs.replace(shown, n=1, seed=seed))
    return msgspec.structs.replace(
        request,
        request_id=f"{index}_{request.request_id}",
        params=params,
        noise_seed=(request.noise_seed + index) % _SEEDS,
    )
