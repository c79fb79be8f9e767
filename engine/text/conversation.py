"""What callers give as a conversation, checked and made plain data, so that a chat template can work on it.

Called by the renderer, and by whoever renders a template. TypeError and ValueError name the message, the field and
what is in it.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


def to_conversation_list(messages: Any) -> list[list[Any]]:
    """One conversation (a list of messages), or a list of conversations, as a list of conversations."""
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages must be a list of dicts or a list of such lists, got {_kind(messages)}")
    if messages and all(isinstance(entry, (list, tuple)) for entry in messages):
        return [list(conversation) for conversation in messages]
    return [list(messages)] if messages else []


def plain_conversation(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Plain copies of the messages, without the keys whose value is None (templates take those for text)."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise TypeError(f"a conversation is a list of messages, got {_kind(messages)}")
    if not messages:
        raise ValueError("the conversation is empty; it must hold at least one message")
    conversation = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        plain = to_plain(message, where)
        if not isinstance(plain, dict):
            raise TypeError(f"{where} must be a dict with 'role' and 'content', got {_kind(message)}")
        plain = {key: value for key, value in plain.items() if value is not None}
        _check_message(plain, where)
        conversation.append(plain)
    return conversation


def plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Plain copies of the tools' descriptions."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise TypeError(f"tools must be a list of dicts, got {_kind(tools)}")
    plain: list[dict[str, Any]] = to_plain(tools, "tools")
    _check_dicts(plain, "tools")
    return plain


def template_messages(
    conversation: list[dict[str, Any]], join_parts: bool, kinds: Sequence[str] = ("text",)
) -> list[dict[str, Any]]:
    """The messages as templates expect them: tool arguments as data, with `join_parts` a text's parts as one str.

    Raises ValueError for a part of a type that is none of `kinds`.
    """
    return [_template_message(message, f"messages[{n}]", join_parts, kinds) for n, message in enumerate(conversation)]


def to_plain(value: Any, what: str) -> Any:
    """`value` rebuilt from plain JSON types, so that a template can reach no object's methods."""
    try:
        return _rebuilt(value)
    except TypeError as error:
        raise TypeError(f"{what} holds {error}, which no chat template can be given") from None
    except RecursionError:
        raise ValueError(f"{what} is too deeply nested") from None


def _rebuilt(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_rebuilt(key): _rebuilt(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rebuilt(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _rebuilt(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return _rebuilt(dump())
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a value of type {_kind(value)}")


def _check_message(message: dict[str, Any], where: str) -> None:
    if "role" not in message:
        raise ValueError(f"{where} needs a 'role'; it has {list(message)}")
    if not isinstance(message["role"], str):
        raise TypeError(f"{where}['role'] must be a str, got {message['role']!r}")
    content = message.get("content", "")
    if not isinstance(content, (str, list)):
        raise TypeError(f"{where}['content'] must be a str, a list of parts or None, got {content!r}")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        text = part.get("text", "") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise TypeError(f"{where}['content'][{number}] must be a str or a dict whose 'text' is one, got {part!r}")
    if "tool_calls" in message:
        _check_dicts(message["tool_calls"], f"{where}['tool_calls']")


def _check_dicts(value: object, where: str) -> None:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TypeError(f"{where} must be a list of dicts, got {value!r}")


def _template_message(message: dict[str, Any], where: str, join_parts: bool, kinds: Sequence[str]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and (kind := part.get("type", "text")) not in kinds:
                takes = "text only" if len(kinds) == 1 else "text and pictures"
                raise ValueError(f"{where} holds a part of type {kind!r}, but this model takes {takes}")
        if join_parts:
            texts = [part if isinstance(part, str) else part.get("text", "") for part in content]
            message = {**message, "content": "\n".join(texts)}
    if "tool_calls" in message:
        message = {**message, "tool_calls": [_with_parsed_arguments(call) for call in message["tool_calls"]]}
    return message


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _kind(value: object) -> str:
    return type(value).__name__
