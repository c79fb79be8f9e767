"""Every tool format: what is read out of whole texts, and that no way of cutting a text changes it."""

import json
import random
from typing import Any

import pytest

from corespan.server.parsers.base import Delta, ToolParser
from corespan.server.parsers.guided import NamedCall, RequiredCalls
from corespan.server.parsers.registry import TOOL_PARSERS, tool_parser_class

Calls = list[tuple[str, Any]]
WEATHER = ("get_weather", {"city": "Oslo", "days": 3})
TOOLS = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "at": {"anyOf": [{"type": "null"}, {"type": "number"}]},
                "tags": {"type": "array"},
                "dry": {"type": "boolean"},
            },
        },
    },
    {"name": "now"},
]
OBJECT = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'
QWEN = "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"

# format, text, content, calls
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", "Just text with a < and <tool in it", "Just text with a < and <tool in it", []),
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", "", [WEATHER]),
    ("hermes", f"Let me see.\n<tool_call>{OBJECT}</tool_call>", "Let me see.\n", [WEATHER]),
    (
        "hermes",
        f'<tool_call>{OBJECT}</tool_call>\n<tool_call>{{"arguments": {{"a": "}}{{"}}, "name": "f"}}</tool_call>\n',
        "",
        [WEATHER, ("f", {"a": "}{"})],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", f"<tool_call>{OBJECT}</tool_call> and more", " and more", [WEATHER]),
    ("hermes", "<tool_call>{nonsense}</tool_call>", "{nonsense}</tool_call>", []),
    ("qwen3_xml", f"Sure.<tool_call>\n{QWEN}\n</tool_call>", "Sure.", [WEATHER]),
    ("qwen3_xml", QWEN, "", [WEATHER]),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=at>null</parameter><parameter=tags>[1, 'a']</parameter>"
        "<parameter=dry>True</parameter><parameter=city>a < b\n\nc</parameter></function></tool_call>",
        "",
        [("get_weather", {"at": None, "tags": [1, "a"], "dry": True, "city": "a < b\n\nc"})],
    ),
    ("qwen3_xml", "<tool_call><function=now></function></tool_call>", "", [("now", {})]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}', "", [WEATHER]),
    ("llama3_json", f'<|python_tag|>{OBJECT}; {{"name": "now", "parameters": {{}}}}', "", [WEATHER, ("now", {})]),
    ("llama3_json", 'The answer is {"name": "x"}', 'The answer is {"name": "x"}', []),
    ("pythonic", '[get_weather(city="Oslo", days=3), now()]', "", [WEATHER, ("now", {})]),
    ("pythonic", "[f(a=-1, b=[1, {'x': null}], c=true)]", "", [("f", {"a": -1, "b": [1, {"x": None}], "c": True})]),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("mistral", f'[TOOL_CALLS][{OBJECT}, {{"name": "now", "arguments": {{}}}}]', "", [WEATHER, ("now", {})]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}', "", [WEATHER]),
    (
        "mistral",
        '[TOOL_CALLS]get_weather{"city": "Oslo", "days": 3}[TOOL_CALLS]now{}',
        "",
        [WEATHER, ("now", {})],
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [WEATHER],
    ),
    (
        "deepseek_v31",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "Well.",
        [WEATHER, ("now", {})],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "",
        [WEATHER],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [WEATHER],
    ),
    (
        "openai",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}<|call|>'
        "<|start|>assistant<|channel|>commentary<|message|>And <now<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
        "And <now",
        [WEATHER, ("now", {})],
    ),
    ("openai", "no <| harmony at all", "no <| harmony at all", []),
    ("granite", f'<|tool_call|>[{OBJECT}, {{"name": "now", "arguments": {{}}}}]', "", [WEATHER, ("now", {})]),
]


def _parse(parser: ToolParser, pieces: list[str]) -> Delta:
    total = Delta()
    for piece in pieces:
        total.add(parser.feed(piece))
    total.add(parser.finish())
    return total


def _checked_calls(delta: Delta) -> Calls:
    """Each call's name and arguments; ids and names come once, indices count up."""
    assert [call.index for call in delta.calls] == list(range(len(delta.calls)))
    assert len({call.id for call in delta.calls}) == len(delta.calls) and all(call.name for call in delta.calls)
    return [(str(call.name), json.loads(call.arguments)) for call in delta.calls]


def _cuts(text: str) -> list[list[str]]:
    generator = random.Random(text)
    ways = [[text], list(text)]
    for _ in range(60):
        cuts = sorted(generator.sample(range(len(text) + 1), min(len(text), generator.randint(1, 8))))
        ways.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return ways


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_any_cut_gives_the_same(name: str, text: str, content: str, calls: Calls) -> None:
    for pieces in _cuts(text):
        delta = _parse(tool_parser_class(name)(TOOLS), pieces)
        assert delta.content == content, pieces
        assert _checked_calls(delta) == calls, pieces


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_text_cut_off_anywhere_is_no_error(name: str, text: str, content: str, calls: Calls) -> None:
    whole = _parse(tool_parser_class(name)(TOOLS), [text])
    for end in range(len(text)):
        delta = _parse(tool_parser_class(name)(TOOLS), list(text[:end]))
        assert len(delta.calls) <= len(whole.calls)
        for cut, full in zip(delta.calls, whole.calls, strict=False):
            assert full.arguments.startswith(cut.arguments), text[:end]


def test_every_parser_has_a_case() -> None:
    assert {TOOL_PARSERS[name] for name, *_ in CASES} == set(TOOL_PARSERS.values())


def test_kimi_keeps_the_models_ids() -> None:
    (text,) = [text for name, text, *_ in CASES if name == "kimi_k2"]
    assert _parse(tool_parser_class("kimi_k2")(), [text]).calls[0].id == "functions.get_weather:0"


def test_mistral_ids_have_nine_characters() -> None:
    (call,) = _parse(tool_parser_class("mistral")(), ["[TOOL_CALLS]f{}"]).calls
    assert call.id is not None and len(call.id) == 9 and call.id.isalnum()


def test_required_calls_are_read_from_an_array() -> None:
    text = '[{"name": "f", "parameters": {"a": [1, "]}"]}}, {"name": "g", "parameters": {}}]'
    for pieces in _cuts(text):
        delta = _parse(RequiredCalls(), pieces)
        assert _checked_calls(delta) == [("f", {"a": [1, "]}"]}), ("g", {})] and not delta.content


def test_a_named_call_is_all_arguments() -> None:
    delta = _parse(NamedCall("f"), ['{"a"', ": 1}"])
    assert _checked_calls(delta) == [("f", {"a": 1})]
