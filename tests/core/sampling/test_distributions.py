"""Each way of sampling against its exact distribution: fixed seeds, chi-square, and nothing outside the support."""

import numpy as np
import pytest
import torch
from sampler_driver import draw_many, exact_distribution
from scipy import stats

from corespan.protocol.params import SamplingParams

COUNT = 4000
PROMPT = (1, 5, 5, 9)
OUTPUT = (9, 3, 3, 3, 40)


def peaked_logits(vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2.0


def p_value(drawn: np.ndarray, probabilities: np.ndarray) -> float:
    """Of the draws, were the probabilities right; tokens expected fewer than 5 times count as one."""
    counts = np.bincount(drawn, minlength=len(probabilities)).astype(float)
    expected = probabilities * len(drawn)
    common = expected >= 5
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, wanted, sum_check=False).pvalue) if len(wanted) > 1 else 1.0


CASES = {
    "temperature 1": SamplingParams(),
    "temperature 0.3": SamplingParams(temperature=0.3),
    "temperature 2": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=7),
    "top_k 1": SamplingParams(top_k=1),
    "top_k beyond the vocabulary": SamplingParams(top_k=10_000),
    "large top_k": SamplingParams(top_k=270, temperature=1.5),
    "top_p": SamplingParams(top_p=0.6),
    "wide top_p": SamplingParams(top_p=0.99, temperature=2.0),
    "tiny top_p": SamplingParams(top_p=1e-4),
    "min_p": SamplingParams(min_p=0.1),
    "min_p 1": SamplingParams(min_p=1.0),
    "top_k and top_p": SamplingParams(top_k=20, top_p=0.7, temperature=0.8),
    "large top_k and top_p": SamplingParams(top_k=280, top_p=0.9, temperature=1.7),
    "min_p and top_p": SamplingParams(min_p=0.02, top_p=0.9, temperature=1.3),
    "presence_penalty": SamplingParams(presence_penalty=1.5),
    "frequency_penalty": SamplingParams(frequency_penalty=0.9),
    "repetition_penalty": SamplingParams(repetition_penalty=1.8),
    "negative penalties": SamplingParams(presence_penalty=-1.0, frequency_penalty=-0.5, repetition_penalty=0.7),
    "everything": SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        temperature=0.9,
        min_p=0.01,
        top_k=50,
        top_p=0.95,
    ),
    "logit_bias": SamplingParams(logit_bias={2: 3.0, 7: -4.0, 11: -100.0}),
    "allowed_token_ids": SamplingParams(allowed_token_ids=[3, 77, 5, 250], temperature=1.5),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    logits = peaked_logits(300)
    params = CASES[name]
    drawn = draw_many(logits, params, COUNT, PROMPT, OUTPUT)
    probabilities = exact_distribution(logits, params, PROMPT, OUTPUT)
    assert set(drawn.tolist()) <= set(np.flatnonzero(probabilities).tolist())
    assert p_value(drawn, probabilities) > 1e-3


def test_the_check_notices_a_temperature_that_is_a_little_off() -> None:
    logits = peaked_logits(300)
    drawn = draw_many(logits, SamplingParams(temperature=1.0), COUNT)
    assert p_value(drawn, exact_distribution(logits, SamplingParams(temperature=1.1))) < 1e-3


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=2.0, top_p=0.97), SamplingParams(), SamplingParams(top_k=900)]
)
def test_a_flat_distribution_over_many_tokens_is_followed_too(params: SamplingParams) -> None:
    logits = peaked_logits(5000, seed=1) * 0.2
    drawn = draw_many(logits, params, 2000)
    probabilities = exact_distribution(logits, params)
    assert set(drawn.tolist()) <= set(np.flatnonzero(probabilities).tolist())
    halves = np.cumsum(probabilities)[drawn] - probabilities[drawn] / 2  # uniform but for the tokens' own widths
    assert stats.kstest(halves, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.75, 0.9, 0.9999])
@pytest.mark.parametrize("levels", [4, 100_000], ids=["many ties", "no ties"])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(0, levels, (2000,), generator=generator).float() * (2.0 / levels)
    params = SamplingParams(top_p=top_p, seed=1)
    nucleus = np.flatnonzero(exact_distribution(logits, params))
    drawn = draw_many(logits, params, 1500)
    assert set(drawn.tolist()) <= set(nucleus.tolist())
    assert len(set(drawn.tolist())) > 0.4 * len(nucleus)


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    drawn = draw_many(torch.zeros(128), SamplingParams(top_k=5), 500)
    assert set(drawn.tolist()) == {0, 1, 2, 3, 4}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((256,), float("-inf"))
    logits[[3, 64, 255]] = torch.tensor([1.0, 0.5, 0.0])
    drawn = draw_many(logits, SamplingParams(temperature=2.0), 2000)
    assert set(drawn.tolist()) == {3, 64, 255}
    assert p_value(drawn, exact_distribution(logits, SamplingParams(temperature=2.0))) > 1e-3
