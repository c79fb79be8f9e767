"""`StructuredOutputsParams`: what the text of an answer is held to. Part of `SamplingParams`; the core compiles it to a
grammar.
"""

from typing import Any

import msgspec

from .param_checks import as_bool, is_encodable, reject, text_list

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of `StructuredOutputsParams` of which exactly one is given."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, repr_omit_defaults=True):
    """A constraint on the text of the answer. Exactly one of `CONSTRAINTS` is given.

    json: a JSON schema, as text or as data; regex: the whole answer matches; choice: the answer is one of these;
    grammar: Lark or EBNF (GBNF) text; json_object=True: any JSON object; structural_tag: JSON text that holds
    `structures`, a list of {"begin": text, "schema": JSON schema, "end": text}, and `triggers`, a list of texts: the
    answer is free until one of the triggers, and then one of the structures that begin with it. Or the newer form,
    with a `format` of const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags,
    tags_with_separator: free text and regexes are supported where something fixed, or nothing, follows.
    The whitespace options and disable_additional_properties apply to JSON schemas (and whitespace to json_object).
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in CONSTRAINTS if getattr(self, kind) is not None]
        if len(given) != 1:
            reject("structured_outputs", given, f"exactly one of {', '.join(CONSTRAINTS)}")
        if self.json is not None and not (isinstance(self.json, (str, dict)) and is_encodable(self.json)):
            reject(
                "structured_outputs.json",
                self.json,
                "a JSON schema as text or as a dict of plain data, integers of 64 bits",
            )
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            text = getattr(self, name)
            if not isinstance(text, str | None) or not is_encodable(text):
                reject(f"structured_outputs.{name}", text, "a string of valid Unicode")
        for name in ("json", "grammar", "structural_tag"):
            text = getattr(self, name)
            if isinstance(text, str) and not text.strip():
                reject(f"structured_outputs.{name}", text, "a non-blank string")
        if self.choice is not None:
            self.choice = text_list("structured_outputs.choice", self.choice)
            if not self.choice:
                reject("structured_outputs.choice", self.choice, "a non-empty list of strings")
        if self.json_object is not None and self.json_object is not True:
            reject("structured_outputs.json_object", self.json_object, "True")
        as_bool("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        as_bool("structured_outputs.disable_additional_properties", self.disable_additional_properties)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            reject("structured_outputs.whitespace_pattern", self.whitespace_pattern, "None with disable_any_whitespace")
