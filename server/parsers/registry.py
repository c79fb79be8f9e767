"""The parsers by name, imported when first asked for, and the guess from a chat template."""

import importlib
import logging
from collections.abc import Mapping

from .base import ReasoningParser, ToolParser

logger = logging.getLogger("corespan.server")

AUTO = "auto"

TOOL_PARSERS: dict[str, str] = {
    "deepseek_v3": "json_calls:DeepSeekV3Parser",
    "deepseek_v31": "json_calls:DeepSeekV31Parser",
    "glm45": "xml_calls:Glm45Parser",
    "granite": "json_calls:GraniteParser",
    "hermes": "json_calls:HermesParser",
    "kimi_k2": "json_calls:KimiK2Parser",
    "llama3_json": "json_calls:Llama3JsonParser",
    "llama4_pythonic": "pythonic:PythonicParser",
    "mistral": "json_calls:MistralParser",
    "openai": "harmony:HarmonyToolParser",
    "pythonic": "pythonic:PythonicParser",
    "qwen3_coder": "xml_calls:Qwen3XmlParser",
    "qwen3_xml": "xml_calls:Qwen3XmlParser",
}
"""Name -> "module:Class" below this package."""

REASONING_PARSERS: dict[str, str] = {
    "deepseek_r1": "reasoning:DeepSeekR1Reasoning",
    "gpt_oss": "harmony:HarmonyReasoning",
    "granite": "reasoning:GraniteReasoning",
    "mistral": "reasoning:MistralReasoning",
    "qwen3": "reasoning:TaggedReasoning",
}


def tool_parser_class(name: str) -> type[ToolParser]:
    """Raises ValueError listing the names there are."""
    loaded = _load(name, TOOL_PARSERS, "tool_call_parser")
    assert issubclass(loaded, ToolParser)
    return loaded


def reasoning_parser_class(name: str) -> type[ReasoningParser]:
    """Raises ValueError listing the names there are."""
    loaded = _load(name, REASONING_PARSERS, "reasoning_parser")
    assert issubclass(loaded, ReasoningParser)
    return loaded


def _load(name: str, table: Mapping[str, str], option: str) -> type:
    if name not in table:
        raise ValueError(f"{option} must be one of {', '.join(sorted(table))} or 'auto', got {name!r}")
    module, _, attribute = table[name].partition(":")
    loaded: type = getattr(importlib.import_module(f".{module}", __package__), attribute)
    return loaded


_TOOL_MARKS = (
    ("<|channel|>", "openai"),
    ("<function=", "qwen3_xml"),
    ("<arg_key>", "glm45"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
)
_REASONING_MARKS = (
    ("<|channel|>", "gpt_oss"),
    ("[THINK]", "mistral"),
    ("Here is my thought process", "granite"),
    ("<think>", "qwen3"),
)


def guess_tool_parser(chat_template: str) -> str | None:
    """The parser whose tags the template writes; None where it writes none that is known."""
    return _guess(chat_template, _TOOL_MARKS)


def guess_reasoning_parser(chat_template: str) -> str | None:
    return _guess(chat_template, _REASONING_MARKS)


def _guess(chat_template: str, marks: tuple[tuple[str, str], ...]) -> str | None:
    return next((name for mark, name in marks if mark in chat_template), None)
