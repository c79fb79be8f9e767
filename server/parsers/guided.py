"""Tool calls that a grammar holds the output to: one named function's arguments, or a JSON array of calls."""

from collections.abc import Iterable
from typing import Any

from .base import CallDelta, Delta, ToolParser
from .buffered import BufferedParser


class NamedCall(ToolParser):
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def read(self, text: str, at_end: bool) -> Delta:
        if not text:
            return Delta()
        return Delta(calls=[CallDelta(0, arguments=text) if self.num_calls else self.new_call(self.name, text)])


class RequiredCalls(BufferedParser):
    """A JSON array of `{"name": ..., "parameters": {...}}`, as `required_schema` asks for; without a call, content."""

    def __init__(self, tools: Iterable[dict[str, object]] = ()) -> None:
        super().__init__(tools)
        self.state = self.after_call
        self._text = ""

    def read(self, text: str, at_end: bool) -> Delta:
        self._text += text
        delta = super().read(text, at_end)
        delta.content = self._text if at_end and not self.num_calls else ""
        return delta

    def after_call(self, delta: Delta) -> bool:
        """Up to the next call: what an array has between its elements."""
        self.buffer = self.buffer.lstrip(" \t\r\n[],")
        self.state = self.in_json if self.buffer else self.after_call
        return bool(self.buffer)


def required_schema(tools: Iterable[dict[str, Any]], only_one: bool = False) -> dict[str, Any]:
    """The JSON schema of at least one call of one of the functions, or of exactly one."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool["name"]]},
                "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema | {"maxItems": 1} if only_one else schema
