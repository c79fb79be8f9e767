"""The pictures among a conversation's parts, taken out before a chat template sees it. Called by the renderer."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...protocol.config import MultiModalConfig
from ...protocol.param_checks import reject
from .media import fetch_image

IMAGE_PART = {"type": "image"}
"""What is left of a picture in its message: chat templates write the placeholder in its place."""

_KINDS = ("image_url", "input_image", "image_pil", "image_embeds", "image")


def take_pictures(
    conversation: Sequence[Any], config: MultiModalConfig
) -> tuple[list[Any], list[Any], list[str | None]]:
    """The messages with `IMAGE_PART` for each picture, the pictures in their order, fetched where a part holds an
    address, and their uuids. Raises VLLMValidationError naming the message and part."""
    pictures: list[Any] = []
    uuids: list[str | None] = []
    messages = []
    for number, message in enumerate(conversation):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)) or not any(_kind(part) for part in content):
            messages.append(message)
            continue
        parts: list[Any] = []
        for index, part in enumerate(content):
            if (kind := _kind(part)) is None:
                parts.append(part)
                continue
            where = f"messages[{number}]['content'][{index}]"
            if len(pictures) >= config.limit_per_prompt:
                reject(where, kind, f"one of at most {config.limit_per_prompt} pictures (limit_mm_per_prompt)")
            pictures.append(_picture(part, kind, config, where))
            uuids.append(part.get("uuid"))
            parts.append(dict(IMAGE_PART))
        messages.append({**message, "content": parts})
    return messages, pictures, uuids


def with_placeholders(messages: Sequence[dict[str, Any]], image_token: str) -> list[dict[str, Any]]:
    """For templates that take a message's text alone: its pictures' placeholders stand before that."""
    placed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and IMAGE_PART in content:
            first = [{"type": "text", "text": image_token}] * content.count(IMAGE_PART)
            message = {**message, "content": [*first, *(part for part in content if part != IMAGE_PART)]}
        placed.append(message)
    return placed


def _kind(part: object) -> str | None:
    """Which kind of picture a part holds; None for any other part."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type") or next((each for each in _KINDS if each in part), None)
    return kind if kind in _KINDS else None


def _picture(part: Mapping[str, Any], kind: str, config: MultiModalConfig, where: str) -> Any:
    if kind == "image" and isinstance(part.get("url"), str):
        return fetch_image(part["url"], config, where)
    value = part.get("image_url" if kind == "input_image" else kind)
    if value is None and part.get("uuid") is not None:
        return None  # it is in the cache
    if kind in ("image_url", "input_image") or isinstance(value, str):
        return fetch_image(value.get("url") if isinstance(value, Mapping) else value, config, where)
    return {"image_embeds": value} if kind == "image_embeds" else value
