"""Tool calls that a grammar holds the output to: one named function's arguments, or a JSON array of calls."""

import json
from collections.abc import Iterable
from typing import Any

from .base import CallDelta, Delta, ToolParser
from .json_value import JsonScanner


class NamedCall(ToolParser):
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def feed(self, text: str) -> Delta:
        if self.num_calls == 0:
            return Delta(calls=[self.new_call(self.name, text)])
        return Delta(calls=[CallDelta(0, arguments=text)])

    def finish(self) -> Delta:
        return Delta()


class RequiredCalls(ToolParser):
    """A JSON array of `{"name": ..., "parameters": {...}}`, in that order, as `required_schema` asks for."""

    def __init__(self, tools: Iterable[dict[str, object]] = ()) -> None:
        super().__init__(tools)
        self._text = ""
        self._position = 0  # up to where the text is understood
        self._scanner: JsonScanner | None = None  # of the arguments being read
        self._called = False

    def feed(self, text: str) -> Delta:
        self._text += text
        delta = Delta()
        while self._advance(delta):
            pass
        return delta

    def finish(self) -> Delta:
        if not self._called and self._text:
            return Delta(content=self._text)
        return Delta()

    def _advance(self, delta: Delta) -> bool:
        """Read one thing more, into `delta`; False where more text is needed."""
        if self._scanner is not None:
            length = self._scanner.feed(self._text[self._position :])
            part = self._text[self._position : self._position + length]
            self._position += length
            if part:
                delta.add_call(CallDelta(self.num_calls - 1, arguments=part))
            if not self._scanner.complete:
                return False
            self._scanner = None
            return True
        name_key = self._text.find('"name"', self._position)
        parameters_key = self._text.find('"parameters"', self._position)
        if name_key < 0 or parameters_key < 0:
            return False
        start = self._text.find("{", parameters_key)
        if start < 0:
            return False
        try:
            name = json.loads("{" + self._text[name_key:parameters_key].rstrip().rstrip(",") + "}")["name"]
        except (ValueError, KeyError):
            return False
        self._called = True
        self._position = start
        self._scanner = JsonScanner()
        delta.add_call(self.new_call(str(name)))
        return True


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
