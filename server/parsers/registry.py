"""The parsers by name, imported when first asked for, and the guess from a chat template."""

import importlib
import logging
from collections.abc import Mapping

from .base import ReasoningParser, ToolParser

logger = logging.getLogger("corespan.server")

AUTO = "auto"

TOOL_PARSERS: dict[str, str] = {}
"""Name -> "module:Class" below this package."""

REASONING_PARSERS: dict[str, str] = {}


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
