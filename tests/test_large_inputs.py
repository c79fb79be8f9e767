"""Very many prompts at once, and very long ones, over each client."""

import random
from typing import Any

import pytest

from corespan import SamplingParams

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
MEGABYTES = {
    "words": "word " * 200_000,
    "one word": "a" * 1_000_000,
    "other scripts": "日本語" * 350_000,
    "noise": "".join(random.Random(0).choices("abcdefghij 0123456789\n.,", k=1_000_000)),
}


def test_ten_thousand_prompts_at_once_are_all_answered_in_order(make_runner: Any) -> None:
    prompts = [[0, 4 + number % 500, 4 + number // 500] for number in range(10_000)]
    runner = make_runner(max_num_seqs=1024, num_gpu_blocks_override=1100)

    outputs = runner.generate(prompts, ONE_TOKEN)

    assert [output.prompt_token_ids for output in outputs] == prompts
    assert {len(output.outputs[0].token_ids) for output in outputs} == {1}
    some = range(0, 10_000, 1111)
    alone = [runner.generate(prompts[number], ONE_TOKEN)[0].outputs[0].token_ids for number in some]
    assert [outputs[number].outputs[0].token_ids for number in some] == alone
    assert runner.is_idle()


@pytest.mark.parametrize("text", MEGABYTES.values(), ids=MEGABYTES)
def test_a_megabyte_of_prompt_is_refused_at_the_caller_and_harms_no_neighbour(runner: Any, text: str) -> None:
    neighbour = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    (alone,) = runner.generate("The quick brown fox", neighbour)

    def send() -> None:
        for prompt in (text, {"prompt": text}):
            with pytest.raises(ValueError, match="max_model_len"):
                runner.stream(prompt, SamplingParams())

    together = runner.with_neighbour("The quick brown fox", neighbour, send)

    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert runner.is_idle()


def test_a_megabyte_of_prompt_that_may_be_truncated_runs(runner: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, truncate_prompt_tokens=8)
    (wanted,) = runner.generate({"prompt_token_ids": runner.engine.get_tokenizer().encode("word " * 20)[-8:]}, params)

    (output,) = runner.generate("word " * 200_000, params)

    assert output.prompt_token_ids == wanted.prompt_token_ids
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
