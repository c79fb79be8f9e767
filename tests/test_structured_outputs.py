"""Structured outputs through whole engines, behind each client: chunked, preempted, stopped, n > 1, beside others."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from clients import IN_PROCESS
from prompts import tokens

from corespan import BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputsParams
from corespan.core.structured_output import manager
from corespan.shared import grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def constrained(max_tokens: int = 200, seed: int | None = None, **fields: Any) -> SamplingParams:
    names = StructuredOutputsParams.__struct_fields__
    constraint = StructuredOutputsParams(**{name: fields.pop(name) for name in names if name in fields})
    return SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=constraint, **fields)


def answers(seed: int) -> SamplingParams:
    return constrained(json=SCHEMA, disable_any_whitespace=True, seed=seed)


def check_answer(output: RequestOutput) -> None:
    (answer,) = output.outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_answers_validate_and_neighbours_do_not_notice(runner: Any) -> None:
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (alone,) = tokens(runner.generate(["Once upon a time"], plain))

    prompts = ["one two", "Once upon a time", "The capital of", "Winter"]
    outputs = runner.generate(prompts, [answers(1), plain, answers(2), answers(3)])

    for output in (outputs[0], outputs[2], outputs[3]):
        check_answer(output)
    assert list(outputs[1].outputs[0].token_ids) == alone


def test_children_each_choose_for_themselves(runner: Any) -> None:
    (output,) = runner.generate(["Is it warm?"], constrained(regex="[a-z]{3}", n=8, seed=5, temperature=2.0))

    texts = [child.text for child in output.outputs]
    assert all(re.fullmatch("[a-z]{3}", text) for text in texts)
    assert len(set(texts)) > 1
    assert {child.finish_reason for child in output.outputs} == {"stop"}


@IN_PROCESS
def test_a_seeded_answer_is_the_same_alone_chunked_and_preempted(make_runner: Callable[..., Any]) -> None:
    prompts = [f"{number} " + "the quick brown fox " * 5 for number in range(6)]
    params = [answers(seed) for seed in range(6)]
    roomy = make_runner()
    expected = [tokens(roomy.generate([prompt], one))[0] for prompt, one in zip(prompts, params, strict=True)]

    tight = make_runner(
        max_num_batched_tokens=32,
        max_num_seqs=8,
        max_model_len=320,
        num_gpu_blocks_override=24,
        enable_prefix_caching=False,
    )
    outputs = tight.generate(prompts, params)

    assert tokens(outputs) == expected
    needed = sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in outputs)
    assert needed > 23 * 16, "everything fitted, so nothing was preempted"
    for output in outputs:
        check_answer(output)


def test_a_stop_string_ends_a_constrained_answer(runner: Any) -> None:
    (output,) = runner.generate(["x"], constrained(regex="[0-9]{4}-[0-9]{4}", stop=["-"], seed=1))

    assert re.fullmatch("[0-9]{4}", output.outputs[0].text)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "-")


def test_a_structural_tag_binds_the_answer_behind_its_trigger_only(runner: Any) -> None:
    structures = [{"begin": "e=", "schema": {"enum": [1, 2, 3]}, "end": ";"}]
    tag = json.dumps({"type": "structural_tag", "structures": structures, "triggers": ["e"]})
    all_params = [constrained(structural_tag=tag, seed=seed, max_tokens=80) for seed in range(4)]

    outputs = runner.generate(["Once upon a time"] * 4, all_params)

    texts = [output.outputs[0].text for output in outputs]
    assert all(re.fullmatch(r"([^e]|e=[123];)*(e(=[123]?)?)?", text) for text in texts)
    assert sum(text.count("e=") for text in texts) > 4
    assert all(re.sub(r"e=[123];", "", text) for text in texts)


def test_min_tokens_does_not_leave_a_finished_answer_without_a_token(runner: Any) -> None:
    (output,) = runner.generate(["x"], constrained(choice=["a"], min_tokens=5, max_tokens=9))

    assert output.outputs[0].text == "a"
    assert len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].finish_reason == "stop"


def test_max_tokens_cuts_an_answer(runner: Any) -> None:
    (output,) = runner.generate(["x"], constrained(regex="[0-9]{50}", max_tokens=7))

    assert re.fullmatch("[0-9]+", output.outputs[0].text)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("constraint", [{"regex": "("}, {"json": {"enum": []}}, {"grammar": 'start: start "a"'}])
def test_an_impossible_constraint_fails_at_the_caller_and_nobody_else(runner: Any, constraint: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="structured_outputs"):
        runner.generate(["x"], constrained(**constraint))

    (output,) = runner.generate(["x"], answers(1))
    check_answer(output)


def test_each_side_compiles_a_grammar_once(make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell over bytes, to refuse it at the caller; the core over the vocabulary."""
    compiled, vocabularies = grammar.compiled, []

    def counted(text: str, tokenizer: Any) -> Any:
        vocabularies.append(tokenizer.vocab_size)
        return compiled(text, tokenizer)

    monkeypatch.setattr(grammar, "compiled", counted)
    monkeypatch.setattr(manager, "compiled", counted)
    llm, constraint = make_llm(), StructuredOutputsParams(regex="compiled [a-z]{3}")
    llm.generate(["one", "two"], SamplingParams(structured_outputs=constraint, n=2, max_tokens=20))
    llm.generate("three", SamplingParams(structured_outputs=StructuredOutputsParams(regex="compiled [a-z]{3}")))
    llm.beam_search(["four"], BeamSearchParams(2, 4, structured_outputs=constraint))

    assert vocabularies == [257, 512]
