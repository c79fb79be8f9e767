"""The KV cache over the three clients: hits, chunks, preemption and sleep do not show in the tokens."""

from typing import Any

import pytest
from clients import IN_PROCESS
from prompts import PROMPTS, greedy, token_ids, tokens

from corespan import RequestOutput, RequestOutputKind, SamplingParams


def test_the_second_run_of_a_prompt_comes_from_the_prefix_cache(runner: Any) -> None:
    runner.call("reset_prefix_cache")
    prompt = {"prompt_token_ids": token_ids(40, seed=7)}

    (cold,) = runner.generate(prompt, greedy(24))
    (warm,) = runner.generate(prompt, greedy(24))

    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    assert tokens([cold]) == tokens([warm])


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_prompt_of_whole_blocks_is_right_when_it_is_cached_whole(runner: Any, length: int) -> None:
    runner.call("reset_prefix_cache")
    prompt = {"prompt_token_ids": token_ids(length)}

    first, second = runner.generate([prompt, prompt], greedy(8))
    (third,) = runner.generate(prompt, greedy(8))

    assert third.num_cached_tokens == length - 16
    assert tokens([first]) == tokens([second]) == tokens([third])


def test_cache_salts_keep_requests_from_sharing_blocks(runner: Any) -> None:
    prompt = {"prompt_token_ids": token_ids(40, seed=9)}

    cached = [
        runner.generate({**prompt, "cache_salt": salt}, greedy(2))[0].num_cached_tokens for salt in ("a", "b", "a")
    ]

    assert cached == [0, 0, 32]


def test_preempted_requests_end_up_with_the_tokens_of_a_roomy_run(make_runner: Any, runner: Any) -> None:
    lengths = (15, 16, 17, 31, 32, 33, 20, 40)
    prompts = [{"prompt_token_ids": token_ids(length)} for length in lengths]
    all_params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=100, ignore_eos=True, logprobs=1, presence_penalty=0.5)
        for seed in range(len(prompts))
    ]
    cramped = make_runner(num_gpu_blocks_override=33, disable_log_stats=False)

    preempted = cramped.generate_at_once(prompts, all_params)

    roomy = runner.generate(prompts, all_params)
    counters = {metric.name: metric for metric in cramped.call("get_metrics")}
    assert counters["vllm:num_preemptions"].value > 0
    assert tokens(preempted) == tokens(roomy)
    for one, other in zip(preempted, roomy, strict=True):
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason == "length"
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
    assert cramped.is_idle()


def test_streams_of_preempted_requests_repeat_and_lose_nothing(make_runner: Any) -> None:
    cramped = make_runner(num_gpu_blocks_override=9, max_model_len=128)
    delta = greedy(90, output_kind=RequestOutputKind.DELTA)
    (expected,) = cramped.generate(PROMPTS[0], greedy(90))
    pieces: list[RequestOutput] = []

    cramped.with_neighbour(PROMPTS[1], greedy(90), lambda: pieces.extend(cramped.stream(PROMPTS[0], delta)))

    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == tokens([expected])[0]
    assert "".join(piece.outputs[0].text for piece in pieces) == expected.outputs[0].text


@IN_PROCESS
def test_as_many_blocks_as_the_longest_request_needs_are_enough(make_runner: Any) -> None:
    tight = make_runner(num_gpu_blocks_override=8, block_size=16, max_model_len=128)

    (output,) = tight.generate({"prompt_token_ids": token_ids(100)}, SamplingParams(max_tokens=None, ignore_eos=True))

    assert len(output.outputs[0].token_ids) == 28


def test_an_automatic_max_model_len_is_what_the_cache_holds(make_runner: Any) -> None:
    fitted = make_runner(num_gpu_blocks_override=8, max_model_len=-1)

    (output,) = fitted.generate({"prompt_token_ids": token_ids(120)}, SamplingParams(max_tokens=None, ignore_eos=True))

    assert fitted.engine.model_config.max_model_len == 128
    assert len(output.outputs[0].token_ids) == 8
