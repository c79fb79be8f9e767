"""The randomness of sampling: one uniform number per (noise seed, position), and nothing else. Called by `Sampler`.

Stateless, so a request draws the same numbers alone, in any batch, after a preemption and in a new process. The
constants are part of the contract: changing them changes every seeded answer.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(noise_seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """noise_seeds: [n] uint64; positions: [n] int64, tokens before the one drawn. Returns [n] float64 in [0, 1)."""
    counters = positions.astype(np.uint64) * _GOLDEN
    bits = _mix(_mix(noise_seeds + _GOLDEN) ^ _mix(counters + _MIX_1))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit words that flips each bit with probability one half."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
