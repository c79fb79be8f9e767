"""What a user may call a prompt: its types, and one checked and taken apart. Called by the renderer and by `LLM`."""

import math
import operator
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict, cast

import numpy as np

from ...protocol.multimodal import MultiModalFeatureSpec
from ...protocol.param_checks import reject, reject_type
from .tokenizer_inputs import check_encodable

MultiModalDataDict = Mapping[str, Any]
"""From "image" to a picture or a list of pictures."""


class TextPrompt(TypedDict):
    """`multi_modal_data`: {"image": a picture or a list of pictures}, each with a placeholder in the prompt."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[MultiModalDataDict]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """`token_type_ids`: for encoders, 1 in the second text of a pair and 0 before."""

    prompt_token_ids: list[int]
    token_type_ids: NotRequired[list[int]]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[MultiModalDataDict]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


class EmbedsPrompt(TypedDict):
    """`prompt_embeds`: [num_tokens, hidden_size] or [1, num_tokens, hidden_size], an array or a tensor."""

    prompt_embeds: Any
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EngineInput(TypedDict):
    """A rendered prompt. With type "embeds" the token ids are as many zeros. `prompt_embeds`: float32, 2-D.
    Type "multimodal" has its pictures prepared in `mm_features`."""

    type: Literal["token", "embeds", "multimodal"]
    prompt_token_ids: list[int]
    arrival_time: float
    prompt: NotRequired[str | None]
    prompt_embeds: NotRequired[np.ndarray]
    mm_features: NotRequired[list[MultiModalFeatureSpec]]
    cache_salt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | EngineInput


def to_prompt_list(prompts: Any) -> list[PromptType]:
    """A prompt, or a list or tuple of prompts, as a list. A non-empty list that begins with an int is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [cast(PromptType, prompts)]
    if isinstance(prompts, (list, tuple)):
        if isinstance(prompts, list) and prompts and _is_int(prompts[0]):
            return [prompts]
        return list(prompts)
    raise TypeError(f"prompts must be a str, a list of token ids, a dict, or a list of these, got {_kind(prompts)}")


def with_mm_kwargs(prompt: PromptType, mm_processor_kwargs: Mapping[str, Any] | None) -> PromptType:
    """A prompt with pictures with these options for them, unless it has its own."""
    if mm_processor_kwargs is None or not isinstance(prompt, Mapping) or not prompt.get("multi_modal_data"):
        return prompt
    return cast(PromptType, {"mm_processor_kwargs": mm_processor_kwargs, **prompt})


def parse_prompt(prompt: Any) -> dict[str, Any]:
    """The prompt as a dict with one of "prompt", "prompt_token_ids", "prompt_embeds", and checked options."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if _is_message(prompt) or (isinstance(prompt, list) and prompt and _is_message(prompt[0])):
        raise TypeError("this is a chat message, not a prompt: give conversations to LLM.chat, or to a chat template")
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise TypeError(f"a prompt is a str, a list of token ids or a dict, got {_kind(prompt)}")
    if "type" in prompt:
        return _parse_rendered(prompt)
    if "encoder_prompt" in prompt or "decoder_prompt" in prompt:
        raise TypeError("encoder_prompt and decoder_prompt are for encoder-decoder models; this model is decoder-only")
    fields = {key: prompt[key] for key in _PROMPT_KEYS if prompt.get(key) is not None}
    if not fields.keys() & {"prompt", "prompt_token_ids", "prompt_embeds"}:
        raise TypeError(f"a prompt dict holds 'prompt', 'prompt_token_ids' or 'prompt_embeds', got {sorted(prompt)}")
    _check_options(fields)
    if "multi_modal_data" in fields and "prompt_embeds" in fields:
        raise ValueError("multi_modal_data goes with a prompt of text or token ids, not with prompt_embeds")
    return fields


def _parse_rendered(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt that was rendered before: of the two kinds of content the one that its type says."""
    if prompt["type"] not in _CONTENT:
        raise ValueError(f"a rendered prompt's type is 'token', 'embeds' or 'multimodal', got {prompt['type']!r}")
    content = _CONTENT[prompt["type"]]
    known = ("prompt", "cache_salt", "arrival_time", "token_type_ids")
    options = {key: prompt[key] for key in known if prompt.get(key) is not None}
    _check_options(options)
    if prompt["type"] == "multimodal":
        options["mm_features"] = prompt.get("mm_features", [])
    return {content: prompt.get(content), **options}


def _is_message(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and "role" in prompt and not prompt.keys() & {"prompt", "prompt_token_ids"}


def _check_options(fields: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for a prompt's text, salt or arrival time that is none."""
    for key in ("prompt", "cache_salt"):
        if fields.get(key) is not None and not isinstance(fields[key], str):
            raise TypeError(f"{key!r} of a prompt dict must be a str, got {_kind(fields[key])}")
    if fields.get("cache_salt") == "":
        raise ValueError("cache_salt must not be empty")
    check_encodable(fields.get("cache_salt") or "")
    check_arrival_time(fields.get("arrival_time"))


def check_arrival_time(arrival_time: object) -> None:
    """Raises TypeError or VLLMValidationError for what is neither None nor a finite number."""
    if arrival_time is None:
        return
    if isinstance(arrival_time, bool) or not isinstance(arrival_time, (int, float)):
        reject_type("arrival_time", arrival_time, "a number")
    if not math.isfinite(arrival_time):
        reject("arrival_time", arrival_time, "finite")


_CONTENT = {"token": "prompt_token_ids", "embeds": "prompt_embeds", "multimodal": "prompt_token_ids"}
_MULTI_MODAL = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "token_type_ids", *_MULTI_MODAL)


def checked_ids(value: Any) -> list[int]:
    """Token ids as a list of plain ints. Raises TypeError naming what is in their place."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        raise TypeError(f"prompt_token_ids must be a list of ints, got {_kind(value)}")
    if type(value) is list and all(type(token_id) is int for token_id in value):
        return value
    if wrong := [token_id for token_id in value if not _is_int(token_id)]:
        raise TypeError(f"prompt_token_ids must be a list of ints, got {wrong[0]!r} ({_kind(wrong[0])}) in it")
    return [operator.index(token_id) for token_id in value]


def _is_int(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, (bool, np.bool_))


def _kind(value: object) -> str:
    return type(value).__name__


def as_float32(value: Any) -> np.ndarray:
    """An array from an array or a tensor (of any device and float type)."""
    if callable(getattr(value, "detach", None)):
        value = value.detach().cpu().float().numpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"prompt_embeds must be an array or a tensor, got {_kind(value)}")
    if value.dtype.kind not in "fiu":
        raise TypeError(f"prompt_embeds must hold real numbers, got an array of {value.dtype}")
    return np.ascontiguousarray(value, dtype=np.float32)
