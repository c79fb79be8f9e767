"""Calls written as Python: the whole answer is `[f(a=1), g(b="x")]`. Read as literals, never run."""

import ast
import json
from typing import Any

from .base import Delta
from .buffered import BufferedParser


class PythonicParser(BufferedParser):
    """Held until the list is closed: only then is it known to be one."""

    start_tags = ("<|python_start|>",)
    END_TAG = "<|python_end|>"

    def __init__(self, tools: Any = ()) -> None:
        super().__init__(tools)
        self.state = self.at_start

    def at_start(self, delta: Delta) -> bool:
        stripped = self.buffer.lstrip()
        (tag,) = self.start_tags
        if not self.at_end and len(stripped) < len(tag) and tag.startswith(stripped):
            return False
        self.state = self.in_list if stripped.startswith(("[", tag)) else self.in_content
        return True

    def in_list(self, delta: Delta) -> bool:
        (tag,) = self.start_tags
        text = self.buffer.strip().removeprefix(tag).removesuffix(self.END_TAG).strip()
        if not self.at_end:
            return False
        calls = _calls(text)
        if calls is not None:
            self.buffer = ""
            delta.calls.extend(self.new_call(name, arguments) for name, arguments in calls)
        self.state = self.in_content
        return False

    def in_content(self, delta: Delta) -> bool:
        delta.content += self.buffer
        self.buffer = ""
        return False


def _calls(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments as JSON; None where the text is no list of calls with literal arguments."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_call(node) for node in tree.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a call with keyword arguments")
    arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    json.dumps(value)
    return value


_JSON_WORDS = {"true": True, "false": False, "null": None}
