"""Logprobs, ranks and the four modes against torch's log-softmax."""

import numpy as np
import pytest
import torch
from sampler_driver import sample_rows

from corespan.core.sampling.logprobs import gather_logprobs
from corespan.protocol.params import SamplingParams

VOCAB = 1000


def some_logits(rows: int, scale: float = 3.0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows)) * scale


@pytest.mark.parametrize("vocab_size", [17, 64, 1000, 40_000])
@pytest.mark.parametrize("k", [0, 1, 5, 17, -1])
def test_values_ranks_and_the_k_likeliest_are_log_softmaxs(vocab_size: int, k: int) -> None:
    logits = some_logits(6, vocab_size=vocab_size)
    chosen = torch.tensor([0, 3, 16, 5, int(logits[4].argmax()), int(logits[5].argmin())])
    arrays = gather_logprobs(logits, chosen.numpy(), k)
    expected = torch.log_softmax(logits.double(), 1)
    values, ids = (
        part[:, : vocab_size if k == -1 else k] for part in expected.sort(dim=1, descending=True, stable=True)
    )
    assert arrays.token_ids.tolist() == torch.cat([chosen[:, None], ids], 1).tolist()
    reference = torch.cat([expected.gather(1, chosen[:, None]), values], 1).numpy()
    assert np.abs(arrays.logprobs - reference).max() < 2e-5
    own = expected.gather(1, chosen[:, None])
    assert arrays.ranks.tolist() == (expected >= own).sum(1).tolist()
    assert (arrays.token_ids.dtype, arrays.logprobs.dtype, arrays.ranks.dtype) == (np.int32, np.float32, np.int32)


def test_equal_tokens_share_a_rank_and_come_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [500, 7, 90]] = 2.0
    arrays = gather_logprobs(logits, np.array([7]), 4)
    assert arrays.token_ids.tolist() == [[7, 7, 90, 500, 0]]
    assert arrays.ranks.tolist() == [3]


def test_a_row_is_the_same_in_any_batch() -> None:
    logits = some_logits(40, vocab_size=20_000)
    chosen = np.arange(40)
    together = gather_logprobs(logits, chosen, 20)
    for row in range(40):
        alone = gather_logprobs(logits[row : row + 1], chosen[row : row + 1], 5)
        assert alone.token_ids.tolist() == together.token_ids[row : row + 1, :6].tolist()
        assert alone.logprobs.tobytes() == together.logprobs[row : row + 1, :6].tobytes()
        assert alone.ranks[0] == together.ranks[row]


def test_each_row_gets_the_number_it_asked_for() -> None:
    logits = some_logits(6)
    params = [
        SamplingParams(logprobs=2),
        SamplingParams(),
        SamplingParams(logprobs=0),
        SamplingParams(logprobs=-1),
        SamplingParams(logprob_token_ids=[9, 4, 700]),
        SamplingParams(logprobs=5, temperature=0),
    ]
    drawn = sample_rows(logits, params)
    arrays = drawn.logprobs
    assert arrays is not None
    expected = torch.log_softmax(logits, 1)
    for row in (0, 2, 3, 4, 5):
        token_id = drawn.token_ids[row]
        assert arrays.token_ids[row, 0] == token_id
        assert arrays.logprobs[row, 0] == pytest.approx(expected[row, token_id].item(), abs=1e-5)
        assert arrays.ranks[row] == (expected[row] >= expected[row, token_id]).sum()
    assert arrays.token_ids[0, 1:3].tolist() == expected[0].topk(2).indices.tolist()
    assert sorted(arrays.token_ids[3, 1:].tolist()) == list(range(VOCAB))
    assert arrays.token_ids[4, 1:4].tolist() == [9, 4, 700]
    assert arrays.logprobs[4, 1:4] == pytest.approx(expected[4, [9, 4, 700]].numpy(), abs=1e-5)
    assert arrays.token_ids[5, 1:6].tolist() == expected[5].topk(5).indices.tolist()
    assert arrays.token_ids.shape == (6, VOCAB + 1)


def test_nobody_wants_logprobs_and_nobody_gets_them() -> None:
    assert sample_rows(some_logits(2), [SamplingParams(), SamplingParams(temperature=0)]).logprobs is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=0.5, top_k=5, seed=1, logprobs=3),
        SamplingParams(temperature=1.5, top_p=0.3, min_p=0.2, logprobs=3),
        SamplingParams(logprobs=3, logit_bias={4: 50.0}, presence_penalty=2.0, allowed_token_ids=[4, 5]),
    ],
)
def test_raw_logprobs_are_the_models_own_whatever_the_sampling(params: SamplingParams) -> None:
    logits = some_logits(1)
    arrays = sample_rows(logits, [params], outputs=[[4]]).logprobs
    assert arrays is not None
    expected = torch.log_softmax(logits[0], 0)
    assert arrays.token_ids[0, 1:].tolist() == expected.topk(3).indices.tolist()
    assert arrays.logprobs[0] == pytest.approx(expected[arrays.token_ids[0].astype(np.int64)].numpy(), abs=1e-5)


def test_raw_logits_are_reported_as_they_are() -> None:
    logits = some_logits(2)
    params = [
        SamplingParams(logprobs=2, temperature=0.5),
        SamplingParams(logprobs=2, temperature=0, logit_bias={3: 9.0}),
    ]
    arrays = sample_rows(logits, params, mode="raw_logits").logprobs
    assert arrays is not None
    assert arrays.logprobs.tolist() == logits.gather(1, torch.from_numpy(arrays.token_ids.astype(np.int64))).tolist()


PROCESSED = [
    SamplingParams(temperature=0.5, logprobs=-1),
    SamplingParams(temperature=0.5, top_k=4, logprobs=-1),
    SamplingParams(temperature=2.0, top_k=300, logprobs=-1),
    SamplingParams(temperature=0.7, top_p=0.5, logprobs=-1),
    SamplingParams(temperature=2.0, top_p=0.95, logprobs=-1),
    SamplingParams(temperature=0.7, min_p=0.1, logprobs=-1),
    SamplingParams(temperature=1.0, logit_bias={4: 5.0}, logprobs=-1),
    SamplingParams(temperature=0, logit_bias={4: 5.0}, presence_penalty=1.0, logprobs=-1),
]


@pytest.mark.parametrize("params", PROCESSED)
def test_processed_modes_report_what_the_token_was_drawn_from(params: SamplingParams) -> None:
    logits = some_logits(1)
    processed = logits[0].clone()
    if params.logit_bias:
        processed[4] += 5.0
    processed[8] -= params.presence_penalty
    processed /= params.temperature or 1.0
    order = processed.argsort(descending=True)
    probabilities = processed.softmax(0)
    kept = torch.ones(VOCAB, dtype=torch.bool)
    kept[probabilities < params.min_p * probabilities.max()] = False
    if params.top_k:
        kept[order[params.top_k :]] = False
    before = probabilities[order].cumsum(0) - probabilities[order]
    kept[order[before >= params.top_p]] = False
    processed[~kept] = float("-inf")
    for mode, expected in (("processed_logits", processed), ("processed_logprobs", processed.log_softmax(0))):
        drawn = sample_rows(logits, [params], outputs=[[8]], mode=mode)
        arrays = drawn.logprobs
        assert arrays is not None
        assert arrays.logprobs[0] == pytest.approx(expected[arrays.token_ids[0].astype(np.int64)].numpy(), abs=2e-4)
        assert np.isfinite(arrays.logprobs[0, 0])
        assert arrays.token_ids[0, 0] == drawn.token_ids[0]
