"""What an answer is held to when the model reasons first: the constraint begins where the reasoning ends."""

import json
from typing import Any

import msgspec

from ...protocol.structured_outputs import StructuredOutputsParams
from ..parsers.base import Format, ReasoningParser

_BREAKS = ("", "\n\n", "\n")  # what models write between their reasoning and their answer


def behind_reasoning(
    structured: StructuredOutputsParams, reasoning: ReasoningParser | None
) -> StructuredOutputsParams | None:
    """The constraint with the reasoning in front, or None where there is none or the two cannot be said as one."""
    answer = _format_of(structured)
    framed = None if reasoning is None or answer is None else reasoning.framed(answer)
    if framed is None:
        return None
    return StructuredOutputsParams(
        structural_tag=json.dumps({"type": "structural_tag", "format": framed}),
        whitespace_pattern=structured.whitespace_pattern,
        disable_any_whitespace=structured.disable_any_whitespace,
        disable_additional_properties=structured.disable_additional_properties,
    )


def _format_of(structured: StructuredOutputsParams) -> Format | None:
    """The constraint as a structural format. None for a grammar, and for a structural tag, which is free before it."""
    if structured.regex is not None:
        return {"type": "regex", "pattern": rf"\n?\n?(?:{structured.regex})"}
    if structured.choice is not None:
        return _any_of([_text(lead + choice) for choice in structured.choice for lead in _BREAKS])
    schema: Any = {"type": "object"} if structured.json_object else structured.json
    if schema is None:
        return None
    if isinstance(schema, str):
        schema = msgspec.json.decode(schema)
    held = {"type": "json_schema", "json_schema": schema}
    return _any_of([{"type": "sequence", "elements": [_text(lead), held]} if lead else held for lead in _BREAKS])


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _any_of(elements: list[Format]) -> Format:
    return {"type": "or", "elements": elements}
