"""Turns `StructuredOutputsParams` into a grammar and says whether it can be met. Loads no torch: the shell checks
requests with it at the caller, and the core's `StructuredOutputManager` compiles what it returns.

The work is llguidance's. Of the two well-kept libraries it fits better: it is one compiled wheel of a few MB that needs
nothing else, where xgrammar depends on torch and transformers, so the shell could not check a grammar without loading
them; it honours whitespace settings and reports schema keywords that it cannot enforce instead of ignoring them; and it
needs no precompilation over the vocabulary, so a new schema costs milliseconds.
"""

import copy
import functools
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import llguidance
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from ..protocol.errors import VLLMValidationError
from ..protocol.structured_outputs import CONSTRAINTS, StructuredOutputsParams
from .structural_format import StructuralFormat, format_grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
"""What tells EBNF, which defines rules so, from Lark."""

MAX_REFERENCES = 250
MAX_RULES = 2000
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"\s*:\s*"([^"]*)"')
_INLINE_SCHEMA = re.compile(r"%json\s*(?=\{)")
_RULE = re.compile(r"^\s*[?!]?[\w.-]+[^:\n]*:", re.MULTILINE)

_DATA = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords of a JSON schema whose values are data: what looks like a schema in them is none."""
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values are schemas by name: no name among them is a keyword."""
_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_MAX_ALTERNATIVES = 50_000  # that the parser follows at a time
_DEEP_STACK_BYTES = 256 << 20  # address space; only what a compilation touches becomes memory
_stack_size_lock = threading.Lock()

T = TypeVar("T")

_EOS = 256


def grammar_text(params: StructuredOutputsParams, tokenizer: "llguidance.LLTokenizer | None" = None) -> str:
    """The grammar in llguidance's own notation. Raises VLLMValidationError when it does not parse or is too big.

    `tokenizer` tells which triggers of a structural tag are special tokens; without it all count as text.
    """
    try:
        _check_size(params)
        if params.json is not None or params.json_object:
            return _json_grammar(params)
        if params.regex is not None:
            return str(llguidance.LLMatcher.grammar_from_regex(params.regex))
        if params.choice is not None:
            options = " | ".join(json.dumps(option) for option in params.choice)
            # One terminal, which becomes one automaton: the parser would follow alternatives of a rule one by one.
            return str(llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}"))
        if params.structural_tag is not None:
            return _structural_tag_grammar(params, tokenizer)
        text = params.grammar or ""
        for inline in _INLINE_SCHEMA.finditer(text):
            _check_inline_schema(text, inline.end())
        return str(llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(text) if _EBNF_RULE.search(text) else text))
    except Exception as error:  # the notation converters raise whatever their parsers do
        raise _refusal(params, str(error)) from error


def check_grammar(params: StructuredOutputsParams) -> None:
    """Raise VLLMValidationError unless the constraint is well formed, supported, and some text begins to meet it.

    What was found sound lately is not looked at again.
    """
    _check_encoded(msgspec.msgpack.encode(params))


@functools.lru_cache(maxsize=128)
def _check_encoded(encoded_params: bytes) -> None:
    params = msgspec.msgpack.decode(encoded_params, type=StructuredOutputsParams)
    grammar = grammar_text(params)
    matcher = compiled(grammar, _byte_tokenizer())
    if matcher.is_error():
        raise _refusal(params, matcher.get_error())
    bitmask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        raise _refusal(params, "no text satisfies it")
    for byte in np.flatnonzero(np.unpackbits(bitmask, bitorder="little")).tolist():
        _check_beginning(params, matcher.deep_copy(), byte)


def _check_beginning(params: StructuredOutputsParams, matcher: llguidance.LLMatcher, byte: int) -> None:
    """Raise VLLMValidationError where the parser meets one of its limits right behind an answer's first byte: too many
    alternatives at once."""
    if matcher.consume_token(byte) and byte != _EOS:
        matcher.compute_bitmask()
    if matcher.is_error():
        raise _refusal(params, matcher.get_error())


def compiled(grammar: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """`is_error` of the result tells whether that failed."""
    limits = llguidance.LLParserLimits(max_items_in_row=_MAX_ALTERNATIVES)
    return with_deep_stack(lambda: llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits))


def with_deep_stack(compile_grammar: Callable[[], T]) -> T:
    """Run in a thread with a stack for the deepest grammar that the limits allow: llguidance compiles by recursion, and
    a stack that overflows ends the process."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(compile_grammar())
        except BaseException as error:
            result.set_exception(error)

    with _stack_size_lock:
        usual = threading.stack_size(_DEEP_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar-compiler", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result.result()


def _check_size(params: StructuredOutputsParams) -> None:
    """Raise ValueError for what might need a deeper stack than `with_deep_stack` gives."""
    text = params.grammar or params.structural_tag or params.json
    num_references = len(set(_REFERENCE.findall(text if isinstance(text, str) else json.dumps(text))))
    if num_references > MAX_REFERENCES:
        raise ValueError(f"it refers to {num_references} definitions, at most {MAX_REFERENCES} are supported")
    num_rules = len(_RULE.findall(params.grammar or ""))
    if num_rules > MAX_RULES:
        raise ValueError(f"it has {num_rules} rules, at most {MAX_RULES} are supported")


def _json_grammar(params: StructuredOutputsParams) -> str:
    schema: Any = {"type": "object"} if params.json is None else params.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    schema = _prepared(schema, params)
    overrides = _whitespace_options(params) or None
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema, allow_nan=False), overrides=overrides))


def _whitespace_options(params: StructuredOutputsParams) -> "JsonCompileOptions":
    options: JsonCompileOptions = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return options


class _Structure(msgspec.Struct):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _StructuralTag(msgspec.Struct):
    structures: Annotated[list[_Structure], msgspec.Meta(min_length=1)]
    triggers: list[Annotated[str, msgspec.Meta(min_length=1)]]


def _structural_tag_grammar(params: StructuredOutputsParams, tokenizer: "llguidance.LLTokenizer | None") -> str:
    """Free text, until a trigger appears; from there one of the structures that begin with it, then free text again.
    The newer form, which says in its `format` what comes when, is `structural_format`'s.
    """
    text = params.structural_tag or ""
    if isinstance(given := msgspec.json.decode(text), dict) and "format" in given:
        newer = msgspec.json.decode(text, type=StructuralFormat)
        return format_grammar(
            newer, lambda schema: _json_rule(schema, params), lambda text: _special_token(text, tokenizer)
        )
    tag = msgspec.json.decode(text, type=_StructuralTag)
    any_tag = " | ".join(f"tag_{number}" for number in range(len(tag.structures)))
    lines = ["%llguidance {}", f"start: ({any_tag})* TEXT", "TEXT: /(.|\\n)*/"]
    for number, trigger in enumerate(tag.triggers):
        special = _special_token(trigger, tokenizer)
        lines.append(f"trigger_{number}{'' if special else '[lazy]'}: TEXT {special or json.dumps(trigger)}")
    for number, structure in enumerate(tag.structures):
        lines.append(f"tag_{number}: {_structure_rule(structure, tag.triggers, params)}")
    return "\n".join(lines)


def _structure_rule(structure: _Structure, triggers: list[str], params: StructuredOutputsParams) -> str:
    json_rule = _json_rule(structure.schema, params)
    for number, trigger in enumerate(triggers):
        if structure.begin.startswith(trigger):
            rest = structure.begin.removeprefix(trigger)
            return f"trigger_{number} {_literal(rest)} {json_rule} {_literal(structure.end)}"
    raise ValueError(f"none of the triggers {triggers} is at the beginning of {structure.begin!r}")


def _json_rule(schema: Any, params: StructuredOutputsParams) -> str:
    schema = _prepared(schema, params)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _whitespace_options(params)}
    return f"%json {json.dumps(schema)}"


def _special_token(text: str, tokenizer: "llguidance.LLTokenizer | None") -> str | None:
    """How a grammar names `text` where it is a special token, which is no text to llguidance."""
    token_ids = [] if tokenizer is None else tokenizer.tokenize_str(text, parse_special=True)
    is_special = tokenizer is not None and len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0])
    return f"<[{token_ids[0]}]>" if is_special else None


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _prepared(schema: Any, params: StructuredOutputsParams) -> Any:
    """The schema as it is compiled. Raises ValueError for numbers that would be taken for others."""
    _check_schema_numbers(schema)
    if params.disable_additional_properties:
        schema = copy.deepcopy(schema)
        for part in list(_schemas_in(schema)):
            if isinstance(part.get("properties"), dict):
                part.setdefault("additionalProperties", False)
    return schema


def _check_inline_schema(grammar: str, start: int) -> None:
    """Check the schema that begins there in a Lark grammar; to name one that does not parse is left to llguidance."""
    try:
        schema, _ = json.JSONDecoder().raw_decode(grammar, start)
    except json.JSONDecodeError:
        return
    _check_schema_numbers(schema)


def _check_schema_numbers(schema: Any) -> None:
    """Raise ValueError for numbers that would be taken for others."""
    for part in _schemas_in(schema):
        for keyword in _NUMBERS:
            if keyword in part:
                _check_numbers(keyword, part[keyword])


def _schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    """The value, where it is a schema, and all schemas within it."""
    if isinstance(value, list):
        for item in value:
            yield from _schemas_in(item)
    elif isinstance(value, dict):
        yield value
        for keyword, part in value.items():
            if keyword in _NAMED_SCHEMAS and isinstance(part, dict):
                yield from _schemas_in(list(part.values()))
            elif keyword not in _DATA:
                yield from _schemas_in(part)


def _check_numbers(keyword: str, value: Any) -> None:
    """Raise ValueError for an integer that llguidance, which computes with doubles, would take for another, and for
    bounds from 2**63 on, which it cuts down."""
    if isinstance(value, list):
        for item in value:
            _check_numbers(keyword, item)
    elif isinstance(value, dict):
        _check_numbers(keyword, list(value.values()))
    elif isinstance(value, int) or (isinstance(value, float) and keyword not in _DATA):
        if abs(value) >= 2**63 or (isinstance(value, int) and int(float(value)) != value):
            raise ValueError(
                f"{keyword} has {value}, only numbers within 2**63 that a double holds exactly are supported"
            )


def _refusal(params: StructuredOutputsParams, reason: str) -> VLLMValidationError:
    kind = next(kind for kind in CONSTRAINTS if getattr(params, kind) is not None)
    first_line = reason.strip().split("\n<state>")[0]
    return VLLMValidationError(
        f"structured_outputs.{kind} cannot be used: {first_line}",
        parameter=f"structured_outputs.{kind}",
        value=getattr(params, kind),
    )


class _Bytes:
    """The smallest tokenizer: a token per byte, and an end."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (_EOS,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
