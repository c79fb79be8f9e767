"""Users' logits processors: loaded by path, told of every change, applied line by line to the right requests."""

import random

import numpy as np
import pytest
import torch
from sampler_driver import Loop, OnlyMultiplesProcessor, generate_alone, new_request, sample_rows, vllm_config

from corespan.core.sampling.metadata import SamplingBatch
from corespan.protocol.params import SamplingParams

VOCAB = 120
MULTIPLES = "sampler_driver:OnlyMultiplesProcessor"
SHARPENING = "sampler_driver:SharpeningProcessor"


def multiples_of(number: int, **fields: object) -> SamplingParams:
    return SamplingParams(extra_args={"multiple": number}, **fields)


def test_a_processor_changes_the_rows_that_ask_for_it() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    params = [multiples_of(7), SamplingParams(temperature=0), multiples_of(11, temperature=0)]
    drawn = sample_rows(logits, params, logits_processors=[MULTIPLES])
    assert drawn.token_ids[0] % 7 == 0
    assert drawn.token_ids[1] == logits[1].argmax()
    assert drawn.token_ids[2] % 11 == 0


def test_a_processor_sees_output_tokens_as_they_grow() -> None:
    tokens = generate_alone(new_request(multiples_of(2)), 5, VOCAB, logits_processors=[MULTIPLES])
    assert [token_id % (2 + count) for count, token_id in enumerate(tokens[3:])] == [0] * 5


def test_each_row_keeps_its_state_while_some_wait() -> None:
    requests = [new_request(multiples_of(2 + index), seed=index, prompt=[index + 1, 5]) for index in range(6)]
    chance, loop, present = random.Random(3), Loop(VOCAB, logits_processors=[MULTIPLES, SHARPENING]), {}
    for row, request in zip((3, 0, 7, 5, 9, 1), requests, strict=True):
        loop.add(row, request)
        present[row] = request
    for _ in range(40):
        loop.step(chance.sample(sorted(present), chance.randint(1, 6)))
    for row, request in present.items():
        tokens = loop.remove(row)
        alone = generate_alone(request, len(tokens) - 2, VOCAB, logits_processors=[MULTIPLES, SHARPENING])
        assert tokens == alone


def test_a_processor_sees_a_line_for_every_row_and_the_vocabulary_unpadded() -> None:
    loop = Loop(VOCAB, logits_processors=[MULTIPLES])
    for row in (0, 4):
        loop.add(row, new_request(multiples_of(3)))
    loop.step([4])
    processor = loop.batch.processors[-1].processor
    assert isinstance(processor, OnlyMultiplesProcessor)
    assert processor.shapes == [(5, VOCAB)]


def test_an_argmax_invariant_processor_works_on_scaled_logits() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    params = [SamplingParams(logprobs=-1, extra_args={"sharpen": 3.0}), SamplingParams(logprobs=-1)]
    arrays = sample_rows(logits, params, mode="processed_logprobs", logits_processors=[SHARPENING]).logprobs
    assert arrays is not None
    for row, sharpen in ((0, 3.0), (1, 1.0)):
        expected = torch.log_softmax((logits[row] - logits[row].max()) * sharpen, 0)
        assert arrays.logprobs[row] == pytest.approx(expected[arrays.token_ids[row].tolist()].numpy(), abs=1e-4)


def test_min_p_comes_before_a_processor_that_makes_tokens_likelier() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)[None] / 10
    params = SamplingParams(min_p=0.5, logprobs=-1, extra_args={"sharpen": 0.01})
    arrays = sample_rows(logits, [params], mode="processed_logprobs", logits_processors=[SHARPENING]).logprobs
    assert arrays is not None
    likely = arrays.token_ids[0, 1:][np.isfinite(arrays.logprobs[0, 1:])]
    assert sorted(likely.tolist()) == list(range(VOCAB - 7, VOCAB))  # 0.6 is below log 2, 0.7 is not


def test_a_request_the_processor_refuses_is_refused_without_a_trace() -> None:
    batch = SamplingBatch(vllm_config(VOCAB, logits_processors=[MULTIPLES]), 4)
    batch.add(1, new_request(multiples_of(3)))
    with pytest.raises(ValueError, match="must not be 0"):
        batch.add(2, new_request(multiples_of(0)))
    assert batch.batch_size == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "write it as"),
        ("no.such.module:Class", "cannot be imported"),
        ("sampler_driver:NoSuchClass", "cannot be imported"),
        ("sampler_driver:MadeUpModel", "not a subclass of LogitsProcessor"),
        ("sampler_driver:vllm_config", "not a subclass of LogitsProcessor"),
    ],
)
def test_a_path_that_does_not_lead_to_a_processor_is_an_error_that_names_it(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        SamplingBatch(vllm_config(VOCAB, logits_processors=[path]), 1)


def test_a_processor_sees_what_the_constraints_leave() -> None:
    params = multiples_of(2, temperature=0, allowed_token_ids=[6, 7, 9], logit_bias={9: 5.0, 6: -2.0})
    loop = Loop(VOCAB, logits_processors=[MULTIPLES])
    loop.add(0, new_request(params))
    loop.step([0])
    (processor,) = loop.batch.processors
    seen = processor.processor.seen[0]  # type: ignore[attr-defined]
    plain = loop.model.logits([1, 2, 3])
    assert torch.isfinite(seen).nonzero().flatten().tolist() == [6, 7, 9]
    assert seen[[6, 7, 9]].tolist() == [plain[6] - 2.0, plain[7], plain[9] + 5.0]
    assert loop.tokens[0][-1] == 6
