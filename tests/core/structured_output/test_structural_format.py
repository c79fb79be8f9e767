"""Structural tags in their newer form: what each format admits, and what is refused by name."""

import json
from typing import Any

import pytest

from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.structured_outputs import StructuredOutputsParams
from corespan.shared.grammar import _byte_tokenizer, check_grammar, compiled, grammar_text


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def choice(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def triggered(*tags: Any, trigger: str = "<f", **options: bool) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), **options}


def separated(*tags: Any, **options: bool) -> dict[str, Any]:
    return {"type": "tags_with_separator", "separator": ",", "tags": list(tags), **options}


ANY = {"type": "any_text", "excludes": []}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
CALL = tag("<f=a>", NUMBER, "</f>")


def params_of(given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": given}))


@pytest.mark.parametrize(
    ("given", "fitting", "others"),
    [
        (const("hi"), ["hi"], ["h", "hix"]),
        (NUMBER, ["12"], ["x"]),
        (ANY, ["", "x\ny"], []),
        (regex("[a-z]+/x"), ["ab/x"], ["ab", "ab\\/x"]),
        (regex("a\\/b\n"), ["a/b\n"], ["a/b"]),
        (sequence(regex("[a-z]+"), const("b"), regex("[0-9]")), ["abb1", "bb1"], ["b1"]),
        (sequence(const("a"), NUMBER, const("z")), ["a5z"], ["a5"]),
        (sequence(tag("<t>", ANY, "</t>"), ANY), ["<t>x\n</t>y", "<t></t>"], ["<t>x", "y"]),
        (choice(const("a"), const("ab")), ["a", "ab"], ["b", "abb"]),
        (choice(tag("<", NUMBER, ">"), const("none")), ["<5>", "none"], ["5"]),
        (
            triggered(CALL, tag("<f=b>", ANY, "</f>")),
            ["", "free", "x<f=a>5</f>y<f=b>zz</f>"],
            ["<f=c", "<f=a>x", "<f=a>5</g>"],
        ),
        (triggered(CALL, at_least_one=True), ["<f=a>5</f>", "<f=a>5</f>x<f=a>6</f>y"], ["", "x<f=a>5</f>"]),
        (triggered(CALL, stop_after_first=True), ["", "xx", "xx<f=a>5</f>"], ["xx<f=a>5</f>x"]),
        (triggered(CALL, at_least_one=True, stop_after_first=True), ["<f=a>5</f>"], ["", "x", "<f=a>5</f>x"]),
        (sequence(tag("<t>", ANY, "</t>"), triggered(CALL)), ["<t>m</t>", "<t>m</t>x<f=a>1</f>"], ["x", "<t>m</t><f>"]),
        (separated(CALL, tag("<b>", ANY, "</b>")), ["", "<f=a>5</f>", "<f=a>5</f>,<b>x,y</b>"], [",", "<f=a>5</f>,"]),
        (separated(CALL, at_least_one=True), ["<f=a>5</f>,<f=a>6</f>"], [""]),
        (separated(CALL, at_least_one=True, stop_after_first=True), ["<f=a>5</f>"], ["", "<f=a>5</f>,<f=a>5</f>"]),
        (separated(tag("<a>", regex("[0-9]+"), "</a>")), ["", "<a>5</a>,<a>67</a>"], ["<a>5</a>,", "<a></a>"]),
    ],
)
def test_a_format_admits_what_it_says(given: Any, fitting: list[str], others: list[str]) -> None:
    params = params_of(given)
    check_grammar(params)
    matcher = compiled(grammar_text(params), _byte_tokenizer())

    def fits(text: str) -> bool:
        copy = matcher.deep_copy()
        return all(copy.consume_token(byte) for byte in text.encode()) and copy.is_accepting()

    assert [text for text in fitting if not fits(text)] == []
    assert [text for text in others if fits(text)] == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"type": "grammar", "grammar": "root ::= [0-9]"}, "'grammar'"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "'qwen_xml_parameter'"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "'qwen_xml'"),
        ({"type": "json_schema", "json_schema": {"type": "bogus"}}, "bogus"),
        ({"type": "any_text", "excludes": ["x"]}, "excludes"),
        ({"type": "const_string"}, "value"),
        (sequence(ANY, const("x")), "any_text"),
        (tag("<a>", sequence(ANY, const("x")), "</a>"), "any_text"),
        (sequence(triggered(CALL), const("x")), "triggered_tags"),
        (sequence(regex("a+"), NUMBER), "a regex or a choice before"),
        (triggered(tag("<f=a>", regex("a+"), "</f>")), "triggered_tags whose tags hold a regex"),
        (separated(CALL, tag("<a>", regex("a+"), "</a>")), "regex"),
        (choice(regex("a+"), NUMBER), "regex"),
        (choice(), "elements must not be empty"),
        (triggered(), "tags must not be empty"),
        (triggered(CALL, trigger="<g"), "none of the triggers"),
        (regex("("), "unclosed group"),
        ([], "format"),
    ],
)
def test_what_cannot_be_said_exactly_is_refused_by_name(given: Any, reason: str) -> None:
    with pytest.raises(VLLMValidationError, match="^structured_outputs.structural_tag cannot be used") as refused:
        check_grammar(params_of(given))
    assert reason in str(refused.value)
