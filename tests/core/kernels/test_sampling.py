"""The native draw and log-probabilities against torch: the same tokens, whatever the shape, the set and the threads."""

from itertools import product

import numpy as np
import pytest
import torch

from corespan.core.kernels import sampling
from corespan.core.kernels.memory import as_tensor
from corespan.core.kernels.sampling import Allowed, DrawParams
from corespan.core.sampling import torch_draw
from corespan.core.sampling.logprobs import torch_logprobs
from corespan.core.sampling.penalties import TokenCounts, apply_penalties, torch_penalties
from corespan.protocol.params import SamplingParams

SIZES = [1, 15, 16, 17, 511, 513, 5000, 49_152]


def rows_of(
    combinations: list[tuple[float, float, int, float]], uniforms: np.ndarray | float | None = None
) -> DrawParams:
    """One row for each (temperature, min_p, top_k, top_p)."""
    temperature, min_p, top_k, top_p = (np.array(column) for column in zip(*combinations, strict=True))
    if uniforms is None:
        uniforms = np.random.default_rng(len(combinations)).random(len(combinations))
    spread = np.broadcast_to(uniforms, top_p.shape).astype(np.float64)
    return DrawParams(
        temperature.astype(float), min_p.astype(float), top_k.astype(np.int64), top_p.astype(float), spread
    )


def every_combination(vocab_size: int) -> list[tuple[float, float, int, float]]:
    top_ks = sorted({0, 1, 7, 300, vocab_size - 1, vocab_size, 2 * vocab_size} - {-1})
    return list(product([0.0, 0.3, 1.0, 3.0], [0.0, 0.01], top_ks, [1.0, 0.9, 0.3]))


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * torch.rand(rows, 1, generator=generator) * 6


def draw(logits: torch.Tensor, params: DrawParams) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    processed = torch.empty(logits.shape)
    return *sampling.Draw(logits, params, processed).run(), processed


def count_differences(logits: torch.Tensor, params: DrawParams) -> int:
    """How many rows get another token from torch: each must lie right beside it, and the uniform on their border."""
    token_ids, largest, processed = draw(logits, params)
    expected_processed = torch.empty(logits.shape)
    expected, expected_largest = torch_draw.draw(logits, params, expected_processed)
    assert largest.tolist() == expected_largest.tolist()
    kept, expected_kept = processed.isfinite(), expected_processed.isfinite()
    assert ((kept != expected_kept).sum(1) <= torch.from_numpy(params.top_p < 1.0)).all()  # rounding at the edge of p
    shared = kept & expected_kept
    torch.testing.assert_close(processed[shared], expected_processed[shared], atol=1e-6, rtol=1e-5)
    different = np.flatnonzero(token_ids != expected).tolist()
    for row in different:
        cumulative = expected_processed[row].double().softmax(0).cumsum(0).numpy()
        first, second = sorted((int(token_ids[row]), int(expected[row])))
        before = cumulative[second - 1] if second else 0.0
        assert before == pytest.approx(cumulative[first], abs=1e-9), "tokens of weight lie between the two"
        assert params.uniforms[row] == pytest.approx(cumulative[first], abs=2e-5)
    return len(different)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_tokens_and_what_they_were_drawn_from_are_torchs(vocab_size: int, isa: str) -> None:
    combinations = every_combination(vocab_size)
    if vocab_size == 49_152:
        combinations = combinations[::5]
    logits = random_logits(len(combinations), vocab_size)
    assert count_differences(logits, rows_of(combinations)) <= 1


@pytest.mark.parametrize(
    "combination", [(0.8, 0.0, 0, 1.0), (0.8, 0.0, 50, 1.0), (1.0, 0.0, 0, 0.9), (1, 0.02, 40, 0.9)]
)
def test_of_thousands_of_draws_all_but_a_few_are_torchs(combination: tuple[float, float, int, float]) -> None:
    differences = 0
    for seed in range(8):
        logits = random_logits(500, 3000, seed)
        uniforms = np.random.default_rng(seed).random(500)
        differences += count_differences(logits, rows_of([combination] * 500, uniforms))
    assert differences <= 4  # of 4000


@pytest.mark.parametrize("masked", [0.5, 0.999])
def test_masked_entries_and_ties_are_treated_as_torch_treats_them(masked: float, isa: str) -> None:
    combinations = every_combination(1000)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 4, (len(combinations), 1000), generator=generator).float()
    logits[torch.rand(logits.shape, generator=generator) < masked] = -torch.inf
    logits[:, 700] = -0.0
    assert count_differences(logits, rows_of(combinations)) <= 1


def test_filters_keep_exactly_what_they_promise_of_equal_entries(isa: str) -> None:
    combinations = [
        (1.0, 0.0, 5, 1.0),
        (1.0, 0.0, 0, 0.5),
        (1.0, 0.0, 100, 0.25),
        (1.0, 1.0, 0, 1.0),
        (1.0, 0, 0, 1e-300),
    ]
    _, _, processed = draw(torch.zeros(5, 128), rows_of(combinations))
    kept = [row.isfinite().nonzero()[:, 0].tolist() for row in processed]
    assert kept == [list(range(size)) for size in (5, 64, 25, 128, 1)]


def test_the_smallest_and_the_largest_uniform_pick_the_first_and_the_last_of_weight(isa: str) -> None:
    combinations = [combination for combination in every_combination(2000) if combination[0] > 0]
    logits = random_logits(len(combinations), 2000)
    for uniform in (0.0, 1.0 - 2**-53):
        token_ids, _, processed = draw(logits, rows_of(combinations, uniform))
        probabilities = processed.double().softmax(1)
        for row, token_id in enumerate(token_ids.tolist()):
            beyond = probabilities[row, :token_id] if uniform == 0.0 else probabilities[row, token_id + 1 :]
            assert probabilities[row, token_id] > 0
            assert beyond.sum() < 1e-6


@pytest.mark.parametrize("vocab_size", SIZES)
def test_greedy_takes_the_first_of_the_largest(vocab_size: int, isa: str) -> None:
    logits = torch.randint(0, 40, (5, vocab_size), generator=torch.Generator().manual_seed(0)).float()
    logits[1] = -torch.inf
    token_ids, largest, processed = draw(logits, rows_of([(0.0, 0.0, 0, 1.0)] * 5))
    assert token_ids.tolist() == [int((row == row.max()).nonzero()[0, 0]) for row in logits]
    assert largest.tolist() == logits.amax(1).tolist()
    assert torch.equal(processed, logits)


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 700, 1002])
def test_a_row_that_is_not_finite_shows_in_its_largest_and_touches_no_other(fault: float, place: int, isa: str) -> None:
    combinations = every_combination(1003)[1::7]
    params = rows_of([combination for combination in combinations for _ in range(2)])
    logits = random_logits(2 * len(combinations), 1003)
    sound = draw(logits, params)
    logits[::2, place if fault != -torch.inf else slice(None)] = fault
    token_ids, largest, processed = draw(logits, params)
    assert not np.isfinite(largest[::2]).any()
    assert (np.isnan(largest[::2]) == np.isnan(fault)).all()
    assert ((0 <= token_ids) & (token_ids < 1003)).all()
    assert token_ids[1::2].tolist() == sound[0][1::2].tolist()
    assert torch.equal(processed[1::2], sound[2][1::2])


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e3, 1e30])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e38])
def test_extreme_temperatures_and_logits_give_torchs_tokens(temperature: float, scale: float) -> None:
    combinations = [(temperature, *others) for _, *others in every_combination(600)]
    logits = (random_logits(len(combinations), 600) / 20).clamp(-1, 1) * scale
    assert count_differences(logits, rows_of(combinations)) <= 2


def test_a_row_is_bitwise_the_same_alone_and_with_any_number_of_threads(isa: str, threads: int) -> None:
    combinations = every_combination(3001)[::3]
    params = rows_of(combinations)
    wide = random_logits(len(combinations), 3072)
    logits = wide[:, :3001]  # rows may lie apart
    token_ids, _, processed = draw(logits, params)
    values = sampling.logprobs(logits, token_ids, 20, None, False)
    torch.set_num_threads(1)
    for row in range(len(combinations)):
        alone = rows_of([combinations[row]], params.uniforms[row])
        one = draw(logits[row : row + 1].contiguous(), alone)
        assert one[0][0] == token_ids[row]
        assert torch.equal(one[2][0], processed[row])
        part = sampling.logprobs(logits[row : row + 1], token_ids[row : row + 1], 20, None, False)
        assert [array[0].tobytes() for array in part] == [array[row].tobytes() for array in values]


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("levels", [5, 10_000_000], ids=["many ties", "no ties"])
def test_logprobs_are_torchs(vocab_size: int, levels: int, isa: str) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-levels, levels, (4, vocab_size), generator=generator).float() * (8 / levels)
    logits[1, ::3] = -torch.inf
    token_ids = np.array([0, vocab_size // 2, vocab_size - 1, int(logits[3].argmax())])
    some_ids = np.stack([token_ids, token_ids[::-1]], axis=1)
    for k, given, as_logits in [
        (0, None, 0),
        (1, None, 0),
        (20, None, 1),
        (300, None, 0),
        (vocab_size, None, 0),
        (2, some_ids, 0),
    ]:
        arguments = (logits, token_ids, min(k, vocab_size) if given is None else k, given, bool(as_logits))
        ids, values, ranks = sampling.logprobs(*arguments)
        expected_ids, expected_values, expected_ranks = torch_logprobs(*arguments)
        assert ids.tolist() == expected_ids.tolist()
        assert ranks.tolist() == expected_ranks.tolist()
        np.testing.assert_allclose(
            values, expected_values, atol=0 if as_logits else 1e-5, rtol=0 if as_logits else 1e-6
        )


def test_logprobs_of_logits_that_are_not_finite_do_no_harm(isa: str) -> None:
    logits = random_logits(4, 1000)
    expected = sampling.logprobs(logits[3:], np.array([9]), 1000, None, False)
    logits[0, ::2], logits[1], logits[2, 5] = torch.nan, -torch.inf, torch.inf
    ids, values, ranks = sampling.logprobs(logits, np.array([0, 1, 5, 9]), 1000, None, False)
    assert ((0 <= ids) & (ids < 1000)).all()
    assert [ids[3].tolist(), values[3].tolist(), ranks[3]] == [part[0].tolist() for part in expected]


@pytest.mark.parametrize("vocab_size", SIZES)
def test_masked_rows_draw_as_from_logits_that_were_masked_before(vocab_size: int, isa: str) -> None:
    combinations = every_combination(vocab_size)[::7]
    logits = random_logits(len(combinations), vocab_size)
    before = logits.clone()
    generator = np.random.default_rng(vocab_size)
    lines = np.arange(0, len(combinations), 2)
    bits = generator.integers(-(2**31), 2**31, (len(lines), (vocab_size + 31) // 32)).astype(np.int32).view(np.uint32)
    bits[0], bits[1 % len(lines)] = 2**32 - 1, 0  # everything, nothing
    allowed = Allowed(lines, bits)
    params = rows_of(combinations)
    processed, expected_processed = torch.empty(logits.shape), torch.empty(logits.shape)
    token_ids, largest = sampling.Draw(logits, params, processed, allowed).run()
    reference = torch_draw.masked(logits, allowed)
    expected, expected_largest = sampling.Draw(reference, params, expected_processed).run()
    assert torch.equal(as_tensor(sampling.masked(logits, allowed)), reference)
    assert largest.tolist() == expected_largest.tolist()
    assert token_ids.tolist() == expected.tolist()
    assert torch.equal(processed, expected_processed)
    assert torch.equal(logits, before)


def test_penalties_are_torchs_to_the_bit(isa: str) -> None:
    generator = np.random.default_rng(0)
    logits = random_logits(5, 3000) * 1e3
    logits[1, :40], logits[2, 7], logits[3, 9] = -torch.inf, torch.nan, 3e38
    penalties = [(0.0, 0.0, 1.7), (0.3, -1.1, 0.6), (2.0, 0.1, 1.0), (-1.3, 0.7, 1e-30)]
    counts = [
        TokenCounts(
            SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition),
            generator.integers(0, 3000, 900).tolist(),
            [*generator.integers(0, 60, 500).tolist(), 7, 9],
        )
        for presence, frequency, repetition in penalties
    ]
    lines = [4, 1, 2, 3]
    settings = np.array([(row.repetition, row.frequency, row.presence) for row in counts], dtype=np.float32)
    expected, got = logits.clone(), logits.clone()
    torch_penalties(expected, lines, counts, settings)
    apply_penalties(got, lines, counts)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert not torch.equal(got[4], logits[4])
    assert torch.equal(got[0], logits[0])
