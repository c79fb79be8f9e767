"""Constraints on the answers of a model that reasons first: they begin behind the reasoning."""

import json
from typing import Any

import httpx
import pytest
from deadlines import DEADLINE
from scripted_model import Scripted

from corespan.protocol.structured_outputs import StructuredOutputsParams
from corespan.server.http.guidance import behind_reasoning
from corespan.server.parsers.registry import reasoning_parser_class
from corespan.shared.grammar import _byte_tokenizer, check_grammar, compiled, grammar_text

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}]
ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"json": SCHEMA}, '{"a":"x"}'),
    ({"json_object": True}, '{"b": []}'),
    ({"regex": "[0-9]+|n"}, "12"),
    ({"choice": ["yes", "no"]}, "no"),
]


def _allows(params: StructuredOutputsParams, text: str) -> bool:
    matcher = compiled(grammar_text(params), _byte_tokenizer())
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(("constraint", "answer"), ANSWERS, ids=lambda value: next(iter(value)) if value else None)
@pytest.mark.parametrize(
    ("prompt", "begins"),
    [("<think>\n", ""), ("no tag", "<think>")],
    ids=["opened by the prompt", "opened by the model"],
)
def test_reasoning_is_free_and_the_answer_behind_it_is_not(
    prompt: str, begins: str, constraint: dict[str, Any], answer: str
) -> None:
    parser = reasoning_parser_class("qwen3")(prompt)

    params = behind_reasoning(StructuredOutputsParams(**constraint), parser)

    assert params is not None
    check_grammar(params)
    for lead in ("", "\n", "\n\n"):
        assert _allows(params, f"{begins}It is {{x}}, or <b>.</think>{lead}{answer}")
    assert not _allows(params, f"{begins}hm</think>{answer} and more")
    assert not _allows(params, f"{begins}hm")
    if begins and "json" in "".join(constraint):
        assert _allows(params, answer)


@pytest.mark.parametrize("constraint", [*(given for given, _ in ANSWERS), {"grammar": 'start: "a"'}])
def test_what_comes_without_reasoning_stays_as_it_is(constraint: dict[str, Any]) -> None:
    structured = StructuredOutputsParams(**constraint)

    assert behind_reasoning(structured, None) is None
    assert behind_reasoning(structured, reasoning_parser_class("qwen3")("<think>\n\n</think>\n\n")) is None
    if structured.grammar:
        assert behind_reasoning(structured, reasoning_parser_class("qwen3")("<think>")) is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "said", "reason"),
    [
        ("required", '[{"name": "pick", "parameters": {"a":"x"}}]', "tool_calls"),
        ({"type": "function", "function": {"name": "pick"}}, '{"a":"x"}', "stop"),
    ],
    ids=["required", "named"],
)
def test_calls_come_behind_reasoning(scripted: Scripted, choice: Any, said: str, reason: str, stream: bool) -> None:
    scripted.llm.say("<think>a ", "colour", "</thi", "nk>\n\n", *said)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": choice}

    answer = httpx.post(f"{scripted.url}/v1/chat/completions", json={**body, "stream": stream}, timeout=DEADLINE).text

    assert scripted.llm.requests[-1][0].structured_outputs.structural_tag
    chunks = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith(("data: {", "{"))]
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    spelled = [choice["delta" if stream else "message"] for choice in choices]
    calls = [call["function"] for part in spelled for call in part.get("tool_calls") or ()]
    assert "".join(part.get("reasoning") or "" for part in spelled) == "a colour"
    assert not any(part.get("content") for part in spelled)
    assert [call["name"] for call in calls if call.get("name")] == ["pick"]
    assert "".join(call["arguments"] for call in calls) == '{"a":"x"}'
    assert choices[-1]["finish_reason"] == reason
