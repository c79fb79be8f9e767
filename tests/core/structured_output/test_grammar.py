"""What a caller is told about a constraint: fine, malformed, unsupported, or impossible."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.structured_outputs import StructuredOutputsParams
from corespan.shared import grammar
from corespan.shared.grammar import MAX_REFERENCES, MAX_RULES, check_grammar, grammar_text

LARK = '?start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'
EBNF = 'root ::= number ("+" number)*\nnumber ::= [0-9]+'


def structural_tag(structures: Sequence[tuple[str, Any, str]], triggers: Sequence[str] = ("<f",)) -> str:
    named = [{"begin": begin, "schema": schema, "end": end} for begin, schema, end in structures]
    return json.dumps({"type": "structural_tag", "structures": named, "triggers": list(triggers)})


TOOLS = structural_tag(
    [
        ("<f=sum>", {"type": "array", "items": {"type": "integer"}}, "</f>"),
        ("<f=say>", {"properties": {"a": {"type": "string"}}, "required": ["a"], "type": "object"}, "</f>"),
        ("[now", True, "]"),
    ],
    triggers=["<f=", "["],
)


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"json": '{"type": "array", "items": {"type": "string"}}'},
        {"json": {"$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"}},
        {"json": {"type": "object"}, "disable_any_whitespace": True},
        {"json": {"type": "object"}, "whitespace_pattern": "[ ]?"},
        {"json": {"properties": {"a": {"type": "integer"}}}, "disable_additional_properties": True},
        {"json_object": True},
        {"json_object": True, "disable_any_whitespace": True},
        {"regex": r"\d{3}-\d{4}"},
        {"regex": ""},
        {"choice": ["yes", "no", 'with "quotes"\n', "日本"]},
        {"grammar": LARK},
        {"grammar": EBNF},
        {"structural_tag": TOOLS},
        {"structural_tag": TOOLS, "disable_any_whitespace": True, "disable_additional_properties": True},
    ],
)
def test_a_sound_constraint_is_accepted(fields: dict[str, Any]) -> None:
    check_grammar(StructuredOutputsParams(**fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": '{"type": '}, "Expecting value"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": {"type": "bogus"}}, "Invalid type: bogus"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "Unsatisfiable"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "Unsatisfiable"),
        ({"json": {"properties": {"a": False}, "required": ["a"], "type": "object"}}, "unsatisfiable"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"type": "number", "minimum": float("nan")}}, "not JSON compliant"),
        ({"json": {"type": "object"}, "whitespace_pattern": "("}, "unclosed group"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "no text satisfies it"),
        ({"regex": r"ab[^\s\S]"}, "no text satisfies it"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": 'start: start "a"'}, "no text satisfies it"),
        ({"grammar": "root ::= ("}, "cannot be used"),
        ({"grammar": "hello ((("}, "cannot be used"),
        ({"structural_tag": "{"}, "truncated"),
        ({"structural_tag": "{}"}, "missing required field `structures`"),
        ({"structural_tag": structural_tag([])}, "length >= 1"),
        ({"structural_tag": structural_tag([("<f>", {}, "")], triggers=[""])}, "length >= 1"),
        ({"structural_tag": structural_tag([("<f>", {}, "")], triggers=["<g"])}, "none of the triggers"),
        ({"structural_tag": structural_tag([("<f>", 5, "")])}, "$.structures[0].schema"),
        ({"structural_tag": structural_tag([("<f>", {"type": "bogus"}, "")])}, "bogus"),
    ],
)
def test_a_malformed_or_impossible_constraint_is_refused_at_the_caller(fields: dict[str, Any], reason: str) -> None:
    params = StructuredOutputsParams(**fields)
    with pytest.raises(VLLMValidationError) as error:
        check_grammar(params)
    kind = next(iter(fields))
    assert str(error.value).startswith(f"structured_outputs.{kind} cannot be used")
    assert reason.lower() in str(error.value).lower()
    assert error.value.parameter == f"structured_outputs.{kind}"


def chain_of_references(length: int, depth: int = 1) -> dict[str, Any]:
    """A schema whose definitions refer to one another in a row, each `depth` arrays deep."""

    def nested(inner: dict[str, Any]) -> dict[str, Any]:
        for _ in range(depth):
            inner = {"type": "array", "items": inner, "minItems": 1}
        return inner

    definitions = {f"d{i}": nested({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length - 1)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length - 1}": {"type": "null"}}}


def chain_of_rules(length: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(length - 2)) + f'\nr{length - 2}: "a"'


@pytest.mark.parametrize(
    "fields",
    [
        {"json": chain_of_references(MAX_REFERENCES)},
        {"json": chain_of_references(MAX_REFERENCES, depth=50)},
        {"grammar": chain_of_rules(MAX_RULES)},
    ],
    ids=["references", "deep references", "rules"],
)
def test_the_deepest_constraints_within_the_limits_do_not_overflow_the_stack(fields: dict[str, Any]) -> None:
    check_grammar(StructuredOutputsParams(**fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": chain_of_references(MAX_REFERENCES + 1)}, "at most 250 are supported"),
        ({"json": json.dumps(chain_of_references(20_000))}, "at most 250 are supported"),
        ({"grammar": chain_of_rules(MAX_RULES + 1)}, "at most 2000 are supported"),
        ({"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000)) + 'r3000 ::= "a"'}, "2000"),
        ({"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, "cannot be used"),
        ({"regex": "(" * 50_000 + "a" + ")" * 50_000}, "nest"),
        ({"json": '{"items":' * 50_000 + "{}" + "}" * 50_000}, "recursion"),
    ],
    ids=["references", "many references", "rules", "EBNF rules", "brackets", "groups", "nesting"],
)
def test_constraints_beyond_the_limits_are_refused_and_do_not_end_the_process(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(VLLMValidationError, match=reason):
        check_grammar(StructuredOutputsParams(**fields))


def test_closing_a_schema_reaches_every_object_and_leaves_the_callers_alone() -> None:
    schema = {"properties": {"a": {"properties": {}}}, "anyOf": [{"properties": {}, "additionalProperties": True}]}
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert grammar_text(params).count('"additionalProperties": false') == 2
    assert schema == {
        "properties": {"a": {"properties": {}}},
        "anyOf": [{"properties": {}, "additionalProperties": True}],
    }


def test_checking_twice_gives_the_same_answer() -> None:
    params = StructuredOutputsParams(regex="[ab]+")
    check_grammar(params)
    check_grammar(params)


def test_a_sound_constraint_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check_grammar(StructuredOutputsParams(regex="checked[0-9]once"))
    monkeypatch.setattr(grammar, "grammar_text", None)
    check_grammar(StructuredOutputsParams(regex="checked[0-9]once"))
    with pytest.raises(TypeError):
        check_grammar(StructuredOutputsParams(regex="checked[0-9]twice"))


def test_the_check_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from corespan.protocol.structured_outputs import StructuredOutputsParams\n"
        "from corespan.shared.grammar import check_grammar\n"
        "check_grammar(StructuredOutputsParams(json_object=True))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def accepts(text: str, **fields: Any) -> bool:
    """Whether `text` is an answer that meets the constraint, token by token of one byte each."""
    params = StructuredOutputsParams(**fields)
    check_grammar(params)
    matcher = grammar.compiled(grammar_text(params), grammar._byte_tokenizer())
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def test_a_choice_of_thousands_holds_to_the_last_byte() -> None:
    options = [f"option {number} of\n{'many' if number % 2 else 'a few'}" for number in range(5000)]
    for option in (options[0], options[1999], options[-1]):
        assert accepts(option, choice=options)
    assert not accepts(options[-1] + "!", choice=options)
    assert not accepts("option 5000 of\na few", choice=options)


def test_alternatives_by_the_thousand_hold_in_a_grammar_too() -> None:
    rules = " | ".join(f'"option {number} " NUMBER' for number in range(2500))
    assert accepts("option 2499 7", grammar=f"start: {rules}\nNUMBER: /[0-9]/")


def test_more_alternatives_than_the_parser_follows_are_refused_at_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_MAX_ALTERNATIVES", 200)
    rules = " | ".join(f'"choice {number} " NUMBER' for number in range(300))
    with pytest.raises(VLLMValidationError, match="items; max is 200"):
        check_grammar(StructuredOutputsParams(grammar=f"start: {rules}\nNUMBER: /[0-9]/"))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**63},
        {"const": -(2**63) + 1},
        {"const": 2**53 + 1},
        {"const": {"a": [-(2**63) - 1]}},
        {"enum": [1, 2**64]},
        {"type": "integer", "maximum": 2**70},
        {"type": "integer", "maximum": 1e20},
        {"properties": {"default": {"type": "integer", "exclusiveMinimum": -(2**64)}}},
    ],
)
def test_numbers_that_would_become_others_are_refused_where_they_bind(schema: dict[str, Any]) -> None:
    inline = f'start: "a" value\nvalue: %json {json.dumps(schema)}\n'
    tags = structural_tag([("<f", schema, "")])
    for fields in ({"json": json.dumps(schema)}, {"structural_tag": tags}, {"grammar": inline}):
        with pytest.raises(VLLMValidationError, match=r"only numbers within 2\*\*63 that a double holds"):
            check_grammar(StructuredOutputsParams(**fields))


def test_large_numbers_and_numbers_that_bind_nothing_are_taken() -> None:
    for number in (2**53, 2**63 - 1024, 1024 - 2**63):
        assert accepts(str(number), json={"enum": [7, number]})
    free = json.dumps({"type": "integer", "default": 2**64, "examples": [2**65]})
    assert accepts("7", json=free)
    assert accepts("a7", grammar=f'start: "a" %json {free}')


DATA_LIKE_A_SCHEMA = {"properties": {"a": 1}}


@pytest.mark.parametrize("schema", [{"const": DATA_LIKE_A_SCHEMA}, {"enum": [DATA_LIKE_A_SCHEMA]}])
def test_closing_objects_leaves_data_as_it_is(schema: dict[str, Any]) -> None:
    text = json.dumps(DATA_LIKE_A_SCHEMA)
    assert accepts(text, json=schema, disable_additional_properties=True)


def test_closing_objects_closes_those_whose_names_are_keywords_and_adds_no_property() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "null"}}}
    schema = {"type": "object", "properties": {"const": inner, "properties": inner}, "default": DATA_LIKE_A_SCHEMA}
    for name in ("const", "properties"):
        assert accepts(json.dumps({name: {"x": None}}), json=schema, disable_additional_properties=True)
        assert not accepts(json.dumps({name: {"y": None}}), json=schema, disable_additional_properties=True)
    assert not accepts('{"additionalProperties": false}', json=schema, disable_additional_properties=True)
    assert schema["default"] == {"properties": {"a": 1}}, "the caller's schema stays as it is"
