"""Speculation changes how many steps a text takes, and nothing else: the same tokens over every client."""

from collections.abc import Callable
from typing import Any

from corespan import SamplingParams, StructuredOutputsParams

CYCLE = [5, 9, 13, 17, 21, 25, 29, 33]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def _requests() -> tuple[list[Any], list[SamplingParams]]:
    """Greedy, seeded and shaped requests, of prompts that repeat themselves and of one that does not."""
    prompts, params = [], []
    for number in range(10):
        prompts.append({"prompt_token_ids": (CYCLE * 6)[number : 20 + 3 * number] + [number + 1]})
        shaped = [{}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {"min_tokens": 3}, {"stop_token_ids": [33, 40]}]
        params.append(
            SamplingParams(
                temperature=[0.0, 0.0, 0.3, 1.0][number % 4],
                seed=number,
                max_tokens=20 + 5 * number,
                ignore_eos=True,
                **shaped[number % 5],
            )
        )
    prompts.append("Hello world")
    params.append(
        SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[ab]{8}"))
    )
    return prompts, params


def _answers(runner: Any, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    outputs = [output.outputs[0] for output in runner.generate(prompts, params)]
    return [(output.token_ids, output.text, output.finish_reason, output.stop_reason) for output in outputs]


def test_tokens_are_those_without_speculation(runner: Any, make_runner: Callable[..., Any]) -> None:
    prompts, params = _requests()
    expected = _answers(runner, prompts, params)
    speculating = make_runner(speculative_config=SPECULATIVE, disable_log_stats=False)
    assert _answers(speculating, prompts, params) == expected
    alone = [_answers(speculating, [prompt], [each])[0] for prompt, each in zip(prompts[:4], params[:4], strict=True)]
    assert alone == expected[:4]


def test_drafts_hold_and_are_counted(make_runner: Callable[..., Any], client_kind: str) -> None:
    """A model that runs in circles: greedy texts of the tiny one soon do."""
    speculating = make_runner(speculative_config=SPECULATIVE, disable_log_stats=False)
    speculating.generate(
        [{"prompt_token_ids": CYCLE * 3}], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    )
    metrics = {metric.name: metric for metric in speculating.call("get_metrics")}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
    assert 0 < accepted <= metrics["vllm:spec_decode_num_draft_tokens"].value
    assert sum(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values) == accepted


def test_a_full_cache_and_preemption_change_nothing(runner: Any, make_runner: Callable[..., Any]) -> None:
    prompts, params = _requests()
    small = make_runner(speculative_config=SPECULATIVE, num_gpu_blocks_override=14, max_model_len=128)
    assert _answers(small, prompts, params) == _answers(runner, prompts, params)
