"""The uniform numbers behind sampling: fixed for ever, and even."""

import numpy as np
import pytest
from scipy import stats

from corespan.core.sampling.noise import uniform


def numbers(seeds: np.ndarray | list[int], positions: np.ndarray | list[int]) -> np.ndarray:
    return uniform(np.asarray(seeds, dtype=np.uint64), np.asarray(positions, dtype=np.int64))


def splitmix(word: int) -> int:
    mask = 2**64 - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


def test_numbers_are_the_ones_older_answers_were_drawn_with() -> None:
    mask = 2**64 - 1
    for seed, position in [(0, 0), (42, 7), (2**64 - 1, 4095), (2**63, 10**9)]:
        inner = splitmix((seed + 0x9E3779B97F4A7C15) & mask)
        outer = splitmix((position * 0x9E3779B97F4A7C15 + 0xBF58476D1CE4E5B9) & mask)
        assert numbers([seed], [position])[0] == (splitmix(inner ^ outer) >> 11) / 2**53


def test_a_number_depends_on_its_own_seed_and_position_only() -> None:
    together = numbers(np.arange(100), np.arange(100) * 3)
    alone = [numbers([i], [3 * i])[0] for i in range(100)]
    assert together.tolist() == alone


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (np.full(50_000, 7), np.arange(50_000)),
        (np.arange(50_000), np.full(50_000, 12)),
        (np.arange(50_000), np.arange(50_000)),
        (np.arange(50_000) << 40, np.full(50_000, 3)),
    ],
    ids=["one request", "neighbouring seeds", "diagonal", "high seed bits"],
)
def test_numbers_are_uniform_and_uncorrelated(seeds: np.ndarray, positions: np.ndarray) -> None:
    drawn = numbers(seeds, positions)
    assert 0.0 <= drawn.min() and drawn.max() < 1.0
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
    pairs = np.histogram2d(drawn[:-1], drawn[1:], bins=10)[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3
