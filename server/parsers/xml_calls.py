"""Formats that write each parameter between tags. Their values are text; the tools' schemas say what they mean."""

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .base import CallDelta, Delta
from .buffered import BufferedParser


class ParameterParser(BufferedParser):
    """A call's arguments grow one whole parameter at a time."""

    def __init__(self, tools: Iterable[dict[str, object]] = ()) -> None:
        super().__init__(tools)
        self._properties: Mapping[str, Any] = {}
        self._num_parameters = 0

    def begin_call(self, name: str, delta: Delta) -> None:
        schema = self.tools.get(name, {}).get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._properties = properties if isinstance(properties, dict) else {}
        self._num_parameters = 0
        delta.add_call(self.new_call(name))

    def add_parameter(self, key: str, text: str, delta: Delta) -> None:
        value = json.dumps(typed(text, self._properties.get(key)), ensure_ascii=False)
        opening = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._put(f"{opening}{json.dumps(key, ensure_ascii=False)}: {value}", delta)

    def end_call(self, delta: Delta) -> None:
        self._put("}" if self._num_parameters else "{}", delta)

    def _put(self, arguments: str, delta: Delta) -> None:
        delta.add_call(CallDelta(self.num_calls - 1, arguments=arguments))


class Qwen3XmlParser(ParameterParser):
    """`<tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter>...</function></tool_call>` (Qwen3-Coder).

    The outer tags may be missing.
    """

    start_tags = ("<tool_call>", "<function=")

    def enter_call(self, tag: str) -> None:
        self.state = self.in_name if tag == "<function=" else self.before_function

    def before_function(self, delta: Delta) -> bool:
        skipped = self.skip("<function=")
        if skipped is None:
            return False
        self.state = self.in_name if skipped else self.in_content
        return True

    def in_name(self, delta: Delta) -> bool:
        position = self.buffer.find(">")
        if position < 0:
            return False
        self.begin_call(self.buffer[:position].strip(), delta)
        self.buffer = self.buffer[position + 1 :]
        self.state = self.before_parameter
        return True

    def before_parameter(self, delta: Delta) -> bool:
        position, tag = self.find(("<parameter=", "</function>", "</tool_call>"))
        if position < 0:
            return False
        self.buffer = self.buffer[position + len(tag) :]
        if tag == "<parameter=":
            self.state = self.in_parameter
            return True
        self.end_call(delta)
        self.state = self.after_function if tag == "</function>" else self.in_content
        return True

    def in_parameter(self, delta: Delta) -> bool:
        position, tag = self.find(("</parameter>", "<parameter=", "</function>"))
        if position < 0:
            return False
        key, _, value = self.buffer[:position].partition(">")
        self.buffer = self.buffer[position:].removeprefix("</parameter>")
        self.add_parameter(key.strip(), without_newlines(value), delta)
        self.state = self.before_parameter
        return True

    def after_function(self, delta: Delta) -> bool:
        if self.skip("</tool_call>") is None:
            return False
        self.state = self.in_content
        return True


class Glm45Parser(ParameterParser):
    """`<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>` (GLM 4.5)."""

    start_tags = ("<tool_call>",)

    def enter_call(self, tag: str) -> None:
        self.state = self.in_name

    def in_name(self, delta: Delta) -> bool:
        position, _ = self.find(("<arg_key>", "</tool_call>"))
        if position < 0:
            return False
        self.begin_call(self.buffer[:position].strip(), delta)
        self.buffer = self.buffer[position:]
        self.state = self.in_pairs
        return True

    def in_pairs(self, delta: Delta) -> bool:
        position, tag = self.find(("</arg_value>", "</tool_call>"))
        if position < 0:
            return False
        pair, self.buffer = self.buffer[:position], self.buffer[position + len(tag) :]
        if tag == "</tool_call>":
            self.end_call(delta)
            self.state = self.in_content
            return True
        key, _, value = pair.partition("</arg_key>")
        self.add_parameter(
            key.rpartition("<arg_key>")[2].strip(), without_newlines(value.partition("<arg_value>")[2]), delta
        )
        return True


def without_newlines(text: str) -> str:
    """Without the one newline that the format puts at either side."""
    return text.removeprefix("\n").removesuffix("\n")


def typed(text: str, schema: object) -> Any:
    """The value that `text` stands for under a parameter's schema; the text itself where none fits."""
    for kind in _kinds(schema):
        if kind == "string":
            return text
        try:
            return _READERS[kind](text.strip())
        except (KeyError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _kinds(schema: object) -> list[str]:
    if not isinstance(schema, dict):
        return []
    if "enum" in schema and "type" not in schema:
        return ["string"]
    for choice in ("anyOf", "oneOf"):
        if isinstance(schema.get(choice), list):
            kinds = [kind for each in schema[choice] for kind in _kinds(each)]
            return sorted(kinds, key=lambda kind: kind == "string")  # a string would take everything
    kind = schema.get("type")
    return sorted(map(str, kind), key=lambda each: each == "string") if isinstance(kind, list) else [str(kind)]


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _null(text: str) -> None:
    if text.lower() not in ("null", "none"):
        raise ValueError(text)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if value != value or value in (float("inf"), float("-inf")):
            raise
        return value


def _structure(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        value = ast.literal_eval(text)
        json.dumps(value)
        return value


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": int,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _structure,
    "array": _structure,
}
