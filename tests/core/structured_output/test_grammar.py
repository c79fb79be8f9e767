"""What a caller is told about a constraint: fine, malformed, unsupported, or impossible."""

import subprocess
import sys
from typing import Any

import pytest

from corespan.core.structured_output.grammar import check_grammar, grammar_text
from corespan.engine.structured_output_check import validate_structured_outputs
from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.params import SamplingParams, StructuredOutputsParams

LARK = '?start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'
EBNF = 'root ::= number ("+" number)*\nnumber ::= [0-9]+'


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
    ],
)
def test_a_sound_constraint_is_accepted(fields: dict[str, Any]) -> None:
    validate_structured_outputs(SamplingParams(structured_outputs=StructuredOutputsParams(**fields)))


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
    ],
)
def test_a_malformed_or_impossible_constraint_is_refused_at_the_caller(fields: dict[str, Any], reason: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    with pytest.raises(VLLMValidationError) as error:
        validate_structured_outputs(params)
    kind = next(iter(fields))
    assert str(error.value).startswith(f"structured_outputs.{kind} cannot be used")
    assert reason.lower() in str(error.value).lower()
    assert error.value.parameter == f"structured_outputs.{kind}"


def test_a_request_without_a_constraint_needs_no_tokenizer() -> None:
    validate_structured_outputs(SamplingParams(), has_tokenizer=False)
    constrained = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    with pytest.raises(VLLMValidationError, match="need a tokenizer"):
        validate_structured_outputs(constrained, has_tokenizer=False)


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


def test_the_check_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from corespan.protocol.params import SamplingParams, StructuredOutputsParams\n"
        "from corespan.engine.structured_output_check import validate_structured_outputs as check\n"
        "check(SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
