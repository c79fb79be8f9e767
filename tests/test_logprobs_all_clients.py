"""Log-probabilities through the whole engine, against transformers, whatever the cache, the chunks and the sampling."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from corespan import RequestOutput, RequestOutputKind, SamplingParams
from corespan.engine.logprobs import FlatLogprobs

PROMPT = list(range(100, 133))  # 33 tokens: two whole blocks of 16 and one token
SIBLING = [*PROMPT[:32], 200]
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def decode(tiny_llama_dir: str) -> Callable[[list[int]], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{tiny_llama_dir}/tokenizer.json")
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def check_prompt_logprobs(output: RequestOutput, distribution: np.ndarray, decode: Callable[[list[int]], str]) -> None:
    """None first, then each token's own value, rank and text, and the likeliest token."""
    prompt = list(output.prompt_token_ids or ())
    entries = output.prompt_logprobs
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    for position, token in enumerate(prompt[1:], start=1):
        entry, row = entries[position], distribution[position - 1]
        assert entry is not None and next(iter(entry)) == token
        assert entry[token].logprob == pytest.approx(row[token], abs=TOLERANCE)
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        if not (text := decode([token])).endswith("\ufffd"):
            assert entry[token].decoded_token == text
        best = int(row.argmax())
        assert entry[best].rank == 1 and entry[best].logprob == pytest.approx(row[best], abs=TOLERANCE)


def test_prompt_logprobs_are_the_same_with_a_cold_and_a_warm_cache(
    runner: Any, reference: Any, decode: Callable[[list[int]], str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for prompt in (PROMPT, PROMPT, SIBLING, PROMPT, PROMPT[:32], PROMPT[:1]):
        (output,) = runner.generate({"prompt_token_ids": prompt}, params)
        check_prompt_logprobs(output, reference.logprobs(prompt), decode)
        assert output.num_cached_tokens == 0


def test_prompt_logprobs_are_the_same_in_chunks_and_beside_others(
    make_runner: Any, reference: Any, decode: Callable[[list[int]], str]
) -> None:
    chunked = make_runner(max_num_batched_tokens=16, max_num_seqs=8)
    asking = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    plain = SamplingParams(temperature=0, max_tokens=3)
    outputs = chunked.generate(
        [{"prompt_token_ids": prompt} for prompt in (PROMPT, SIBLING, PROMPT)], [asking, plain, asking]
    )
    for output in (outputs[0], outputs[2]):
        check_prompt_logprobs(output, reference.logprobs(PROMPT), decode)
    assert outputs[1].prompt_logprobs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.5, "top_k": 5, "seed": 1},
        {"temperature": 1.5, "top_p": 0.5, "seed": 2, "presence_penalty": 1.0, "logit_bias": {200: 50.0}},
    ],
)
@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_sampled_logprobs_are_the_models_own_whatever_the_sampling(
    runner: Any, reference: Any, fields: dict[str, Any], num_logprobs: int
) -> None:
    (output,) = runner.generate(
        {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=num_logprobs, **fields)
    )
    answer = output.outputs[0]
    distribution = reference.logprobs([*PROMPT, *answer.token_ids])
    total = 0.0
    for position, token in enumerate(answer.token_ids):
        row, entry = distribution[len(PROMPT) + position - 1], answer.logprobs[position]
        assert num_logprobs <= len(entry) <= num_logprobs + 1 and next(iter(entry)) == token
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        total += entry[token].logprob
        for each, found in entry.items():
            assert found.logprob == pytest.approx(row[each], abs=TOLERANCE)
        likeliest = np.argsort(-row)[:num_logprobs].tolist()
        assert set(likeliest) | {token} == set(entry)
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-5)


def test_streams_carry_each_logprob_once(runner: Any) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=8,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        output_kind=RequestOutputKind.DELTA,
    )
    pieces = runner.stream({"prompt_token_ids": PROMPT}, params)
    streamed = [entry for piece in pieces for entry in piece.outputs[0].logprobs]
    (whole,) = runner.generate({"prompt_token_ids": PROMPT}, params.clone())
    assert [list(entry) for entry in streamed] == [list(entry) for entry in whole.outputs[0].logprobs]
    assert len(pieces[0].prompt_logprobs) == len(PROMPT)
    assert all(len(piece.prompt_logprobs) == 0 for piece in pieces[1:])


def test_flat_logprobs_hold_the_same_values(runner: Any) -> None:
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}
    plain, flat = (
        runner.generate({"prompt_token_ids": PROMPT}, SamplingParams(flat_logprobs=flat, **params))[0]
        for flat in (False, True)
    )
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs) and isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == list(plain.outputs[0].logprobs)
    assert list(flat.prompt_logprobs)[1:] == list(plain.prompt_logprobs)[1:]


def test_preempted_requests_keep_their_logprobs(make_runner: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": PROMPT[: 15 + at]} for at in (0, 1, 2, 16, 17, 18)]
    roomy = make_runner().generate(prompts, params)
    cramped = make_runner(num_gpu_blocks_override=14, max_model_len=128).generate(prompts, params)
    for expected, output in zip(roomy, cramped, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        for ours, theirs in (
            (output.outputs[0].logprobs, expected.outputs[0].logprobs),
            (output.prompt_logprobs[1:], expected.prompt_logprobs[1:]),
        ):
            assert [list(entry) for entry in ours] == [list(entry) for entry in theirs]
            values, wanted = ([each.logprob for entry in part for each in entry.values()] for part in (ours, theirs))
            assert values == pytest.approx(wanted, abs=TOLERANCE)
