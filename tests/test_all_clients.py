"""One suite over the three clients: the same requests give the same tokens, texts and ends behind each of them."""

from typing import Any

import pytest
from prompts import PROMPTS, greedy, token_ids, tokens

from corespan import RequestOutput, RequestOutputKind, SamplingParams

MANY_PROMPTS = [*PROMPTS, "Winter, spring and 日本", "x" * 150]


@pytest.fixture(scope="session")
def first_seen() -> dict[str, Any]:
    """What the first client gave for a case; the others must give the same."""
    return {}


def test_greedy_tokens_equal_transformers(runner: Any, reference: Any) -> None:
    outputs = runner.generate(MANY_PROMPTS, greedy(40))

    expected = [reference.greedy(output.prompt_token_ids, 40, eos_token_id=None) for output in outputs]
    assert tokens(outputs) == expected
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(MANY_PROMPTS)


def test_text_is_the_decoded_tokens(runner: Any, tiny_llama_dir: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{tiny_llama_dir}/tokenizer.json")

    outputs = runner.generate(MANY_PROMPTS, greedy(24))

    assert [output.outputs[0].text for output in outputs] == [tokenizer.decode(ids) for ids in tokens(outputs)]
    assert [output.prompt for output in outputs] == MANY_PROMPTS


def test_the_end_token_stops_without_a_reason(runner: Any, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, logit_bias={1: 1000.0}, min_tokens=5)

    (output,) = runner.generate(PROMPTS[0], params)

    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].token_ids[-1] == 1
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_a_mix_of_params_gives_each_request_what_it_gets_alone(runner: Any, first_seen: dict[str, Any]) -> None:
    all_params = [
        greedy(9),
        SamplingParams(temperature=0.8, seed=1, max_tokens=17),
        SamplingParams(temperature=1.3, top_k=20, seed=2, max_tokens=20, presence_penalty=1.0),
        greedy(12, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, top_p=0.7, min_p=0.01, seed=3, max_tokens=11, logprobs=2),
    ]

    together = runner.generate(MANY_PROMPTS, all_params)

    alone = [runner.generate(prompt, params)[0] for prompt, params in zip(MANY_PROMPTS, all_params, strict=True)]
    assert tokens(together) == tokens(alone)
    assert tokens(together) == first_seen.setdefault("mixed", tokens(together))


def test_seeded_sampling_does_not_depend_on_unseeded_mates(runner: Any, first_seen: dict[str, Any]) -> None:
    seeded = SamplingParams(seed=42, temperature=0.8, top_k=50, max_tokens=16)
    unseeded = SamplingParams(temperature=0.8, max_tokens=16)

    runs = [
        tokens(runner.generate([PROMPTS[0]] + [PROMPTS[1]] * mates, [seeded] + [unseeded] * mates))[0]
        for mates in (0, 1, 7)
    ]

    assert runs == [first_seen.setdefault("seeded", runs[0])] * 3


def test_children_of_n_have_seeds_of_their_own_and_all_output_kinds_agree(
    runner: Any, first_seen: dict[str, Any]
) -> None:
    def answers(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=12, ignore_eos=True, output_kind=kind)
        return runner.stream(PROMPTS[0], params)

    (final,) = answers(RequestOutputKind.FINAL_ONLY)
    expected = {output.index: (output.text, output.token_ids) for output in final.outputs}
    latest: dict[int, Any] = {}
    cumulative = answers(RequestOutputKind.CUMULATIVE)
    for output in cumulative:
        latest |= {each.index: (each.text, each.token_ids) for each in output.outputs}
    joined: dict[int, Any] = {}
    deltas = answers(RequestOutputKind.DELTA)
    for output in deltas:
        for each in output.outputs:
            text, ids = joined.get(each.index, ("", []))
            joined[each.index] = (text + each.text, ids + each.token_ids)

    assert sorted(expected) == [0, 1, 2]
    assert len({text for text, _ in expected.values()}) == 3
    assert latest == joined == expected == first_seen.setdefault("children", expected)
    for outputs in (cumulative, deltas):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_each_child_equals_the_single_request_with_its_seed(runner: Any) -> None:
    params = SamplingParams(n=3, seed=10, temperature=1.0, max_tokens=12)

    (together,) = runner.generate(PROMPTS[1], params)

    for child in together.outputs:
        single = SamplingParams(seed=10 + child.index, temperature=1.0, max_tokens=12)
        assert tokens(runner.generate(PROMPTS[1], single)) == [child.token_ids]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_begins_and_ends_inside_tokens_cuts_there(runner: Any, include: bool) -> None:
    (whole,) = runner.generate(PROMPTS[1], greedy(24))
    text = whole.outputs[0].text
    stop = text[5:9]
    end = text.index(stop) + (len(stop) if include else 0)

    outputs = runner.stream(
        PROMPTS[1], greedy(24, stop=[stop], include_stop_str_in_output=include, output_kind=RequestOutputKind.DELTA)
    )

    assert "".join(output.outputs[0].text for output in outputs) == text[:end]
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", stop)
    assert runner.is_idle()


def test_a_stop_token_id_ends_the_request_and_is_the_reason(runner: Any) -> None:
    (whole,) = runner.generate(PROMPTS[0], greedy(24))
    stop = whole.outputs[0].token_ids[5]
    end = whole.outputs[0].token_ids.index(stop) + 1

    (output,) = runner.generate(PROMPTS[0], greedy(24, stop_token_ids=[stop]))

    assert output.outputs[0].token_ids == whole.outputs[0].token_ids[:end]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_an_empty_text_is_the_begin_token_alone(runner: Any) -> None:
    (output,) = runner.generate("", greedy(3))

    assert output.prompt_token_ids == [0]
    assert len(output.outputs[0].token_ids) == 3


def test_prompt_embeds_give_what_their_tokens_give(make_runner: Any, runner: Any, reference: Any) -> None:
    import torch

    prompts = [[0, *token_ids(length)] for length in (4, 39)]
    expected = tokens(runner.generate(prompts, greedy(24)))
    embed = reference.model.get_input_embeddings()
    embeds = [{"prompt_embeds": embed(torch.tensor(ids)).detach()} for ids in prompts]

    outputs = make_runner(enable_prompt_embeds=True).generate([*embeds, *prompts], greedy(24))

    assert tokens(outputs) == [*expected, *expected]
