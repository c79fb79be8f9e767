"""Log-probabilities through the whole engine, against transformers, whatever the cache, the chunks and the sampling."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clients import IN_PROCESS

from corespan import RequestOutput, RequestOutputKind, SamplingParams
from corespan.engine.outputs.logprobs import FlatLogprobs

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


@IN_PROCESS
def test_prompt_logprobs_survive_a_preemption_in_mid_prompt(
    make_runner: Any, reference: Any, decode: Callable[[list[int]], str]
) -> None:
    """The long prompt is computed in many small chunks, while others before it grow and take its blocks."""
    engine = make_runner(
        max_num_batched_tokens=8,
        max_num_seqs=4,
        max_model_len=256,
        num_gpu_blocks_override=19,
        disable_log_stats=False,
    )
    growing = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
    asking = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    long = [4 + (7 * position) % 500 for position in range(220)]
    prompts = [{"prompt_token_ids": ids} for ids in (PROMPT[:10], PROMPT[:11], long)]

    outputs = engine.generate_at_once(prompts, [growing, growing, asking])

    preemptions = [metric.value for metric in engine.call("get_metrics") if metric.name == "vllm:num_preemptions"]
    assert preemptions[0] > 0
    check_prompt_logprobs(outputs[2], reference.logprobs(long), decode)
    for output in outputs:
        check_logprobs(output, reference)


def test_logprobs_behind_a_cached_prefix_and_of_every_child_are_the_models_own(runner: Any, reference: Any) -> None:
    runner.call("reset_prefix_cache")
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=5, ignore_eos=True, logprobs=3)

    outputs = [runner.generate({"prompt_token_ids": PROMPT}, params)[0] for _ in range(2)]

    assert outputs[1].num_cached_tokens == 32
    for output in outputs:
        check_logprobs(output, reference)


def check_logprobs(output: RequestOutput, reference: Any) -> None:
    """Of every child, the chosen token's and the top entries' values and ranks."""
    prompt = list(output.prompt_token_ids or ())
    for answer in output.outputs:
        distribution = reference.logprobs([*prompt, *answer.token_ids])
        assert len(answer.logprobs) == len(answer.token_ids)
        for position, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            row = distribution[len(prompt) + position - 1]
            assert next(iter(entry)) == token and entry[token].rank == 1 + int((row > row[token]).sum())
            for each, found in entry.items():
                assert found.logprob == pytest.approx(row[each], abs=TOLERANCE)
                assert each == token or found.rank == 1 + int((row > row[each]).sum())


def test_all_of_the_vocabulary_is_reported_on_request(make_runner: Any, reference: Any) -> None:
    engine = make_runner(max_logprobs=-1)
    params = SamplingParams(seed=1, max_tokens=3, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)

    (output,) = engine.generate({"prompt_token_ids": PROMPT[:5]}, params)

    sampled = output.outputs[0]
    distribution = reference.logprobs([*PROMPT[:5], *sampled.token_ids])
    entries = [*output.prompt_logprobs[1:], *sampled.logprobs]
    assert output.prompt_logprobs[0] is None and len(entries) == 7
    for row, entry in zip(distribution, entries, strict=False):
        assert len(entry) == len(row)
        assert [entry[token].logprob for token in range(len(row))] == pytest.approx(row.tolist(), abs=TOLERANCE)
        assert sorted(each.rank for each in entry.values()) == list(range(1, len(row) + 1))


CHANGING: dict[str, Any] = {"logit_bias": {200: 3.0, 201: -2.0}, "presence_penalty": 1.0, "repetition_penalty": 1.3}


@IN_PROCESS
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_the_mode_says_which_values_are_reported(make_runner: Any, reference: Any, mode: str) -> None:
    """ "processed": what is drawn from, so biased, penalised, divided by the temperature and cut by top_k."""
    engine = make_runner(logprobs_mode=mode, max_logprobs=-1)
    variants = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=1, **CHANGING),
        SamplingParams(seed=2, temperature=0.5, top_k=7, max_tokens=4, ignore_eos=True, logprobs=-1, **CHANGING),
    ]

    outputs = engine.generate([{"prompt_token_ids": PROMPT}] * 2, variants)

    for output, params in zip(outputs, variants, strict=True):
        answer = output.outputs[0]
        logits = reference.logits([*PROMPT, *answer.token_ids])
        for position, entry in enumerate(answer.logprobs):
            row = logits[len(PROMPT) + position - 1]
            if mode.startswith("processed"):
                row = processed(row, params, answer.token_ids[:position])
            expected = row - np.logaddexp.reduce(row) if mode.endswith("logprobs") else row
            found = np.array([entry[token].logprob for token in range(len(row))])
            assert found == pytest.approx(expected, abs=5e-4 if mode.endswith("logits") else TOLERANCE)
    first = reference.logits(PROMPT)
    if mode.endswith("logprobs"):
        first = first - np.logaddexp.reduce(first, axis=1, keepdims=True)
    for position, token in enumerate(PROMPT[1:], start=1):
        assert outputs[0].prompt_logprobs[position][token].logprob == pytest.approx(
            first[position - 1, token], abs=1e-4
        )


def processed(logits: np.ndarray, params: SamplingParams, generated: list[int]) -> np.ndarray:
    """Step by step as documented, in float64."""
    row = logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for token in {*PROMPT, *generated}:
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(generated):
        row[token] -= params.presence_penalty
    if params.temperature > 0:
        row /= params.temperature
        row[row < np.sort(row)[-params.top_k]] = -np.inf
    return row


def test_prompt_logprobs_come_with_every_number_of_children(
    runner: Any, reference: Any, decode: Callable[[list[int]], str]
) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=3, prompt_logprobs=1)
    for kind in RequestOutputKind:
        params.output_kind = kind
        outputs = runner.stream({"prompt_token_ids": PROMPT}, params)
        first = next(output for output in outputs if output.prompt_logprobs)
        check_prompt_logprobs(first, reference.logprobs(PROMPT), decode)


def test_named_tokens_are_reported_in_place_of_the_likeliest(runner: Any, reference: Any) -> None:
    named = [7, 300, 5]
    params = SamplingParams(seed=1, max_tokens=4, ignore_eos=True, logprob_token_ids=named)

    (output,) = runner.generate({"prompt_token_ids": PROMPT}, params)

    answer = output.outputs[0]
    distribution = reference.logprobs([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
    for row, token, entry in zip(distribution, answer.token_ids, answer.logprobs, strict=False):
        assert list(entry) == list(dict.fromkeys([token, *named]))
        assert [each.logprob for each in entry.values()] == pytest.approx(row[list(entry)].tolist(), abs=TOLERANCE)
