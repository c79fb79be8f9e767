"""From what a user calls a prompt to what the engine takes: token ids or embeddings.

Called by the input processor for raw prompts and by `LLM` for chats; users may call it to prepare requests themselves.
"""

import dataclasses
import logging
import operator
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict, cast

import numpy as np

from ..protocol.config import ModelConfig
from ..protocol.errors import VLLMValidationError
from ..protocol.param_checks import as_bool, int_at_least, reject, reject_type
from .chat_template import reads_content_parts, render_chat_template
from .conversation import plain_conversation, template_messages
from .tokenizer import Tokenizer, check_encodable

logger = logging.getLogger("corespan.engine")

_CONTENT_FORMATS = ("auto", "string", "openai")


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """`prompt_embeds`: [num_tokens, hidden_size] or [1, num_tokens, hidden_size], an array or a tensor."""

    prompt_embeds: Any
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EngineInput(TypedDict):
    """A rendered prompt. With type "embeds" the token ids are as many zeros. `prompt_embeds`: float32, 2-D."""

    type: Literal["token", "embeds"]
    prompt_token_ids: list[int]
    arrival_time: float
    prompt: NotRequired[str | None]
    prompt_embeds: NotRequired[np.ndarray]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | EngineInput


@dataclass(frozen=True, slots=True)
class TokenizeParams:
    """How text becomes token ids. `truncate_prompt_tokens` keeps that many tokens, -1: as many as the model can take.

    `truncation_side` says which end is cut off. `add_special_tokens` applies to text only.
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.truncation_side not in ("left", "right"):
            reject("truncation_side", self.truncation_side, "'left' or 'right'")
        if self.truncate_prompt_tokens is not None:
            legal = "None, -1 or an integer of at least 0"
            int_at_least("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, legal)
        as_bool("add_special_tokens", self.add_special_tokens)

    def with_kwargs(self, kwargs: Mapping[str, Any] | None) -> "TokenizeParams":
        """These params with a call's `tokenization_kwargs` over them; unknown ones are ignored with a warning."""
        if not isinstance(kwargs, Mapping | None):
            reject_type("tokenization_kwargs", kwargs, "None or a dict")
        known = {parameter.name for parameter in dataclasses.fields(self)}
        if unknown := sorted(str(name) for name in (kwargs or {}) if name not in known):
            logger.warning("tokenization_kwargs ignored: %s (known: %s)", ", ".join(unknown), ", ".join(sorted(known)))
        chosen = {name: value for name, value in (kwargs or {}).items() if name in known and value is not None}
        return dataclasses.replace(self, **chosen)


@dataclass(frozen=True, slots=True)
class ChatParams:
    """How a conversation becomes text. `chat_template`: a template's text, its file or its name; None: the model's own.

    `chat_template_content_format`: whether the template is given a message's parts ("openai") or their text
    ("string"); "auto" looks at what the template reads.
    """

    chat_template: str | os.PathLike[str] | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises VLLMValidationError for what is none of these; tools are checked with the messages."""
        if not isinstance(self.chat_template, str | os.PathLike | None):
            reject("chat_template", self.chat_template, "None, a template's text, its file or one of the model's names")
        if self.chat_template_content_format not in _CONTENT_FORMATS:
            reject("chat_template_content_format", self.chat_template_content_format, f"one of {_CONTENT_FORMATS}")
        as_bool("add_generation_prompt", self.add_generation_prompt)
        as_bool("continue_final_message", self.continue_final_message)
        kwargs = self.chat_template_kwargs
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            reject("chat_template_kwargs", kwargs, "a dict from names to values")
        if own := sorted(set(kwargs) & {"messages", *self.__slots__}):
            reject("chat_template_kwargs", own, "other names than those of the call's own arguments")


def to_prompt_list(prompts: Any) -> list[PromptType]:
    """A prompt, or a list or tuple of prompts, as a list. A non-empty list that begins with an int is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [cast(PromptType, prompts)]
    if isinstance(prompts, (list, tuple)):
        if isinstance(prompts, list) and prompts and _is_int(prompts[0]):
            return [prompts]
        return list(prompts)
    raise TypeError(f"prompts must be a str, a list of token ids, a dict, or a list of these, got {_kind(prompts)}")


class Renderer:
    """Tokenises prompts and conversations for one model. Safe to call from several threads."""

    def __init__(self, model_config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.default_cmpl_tok_params = TokenizeParams()
        self.default_chat_tok_params = TokenizeParams(add_special_tokens=False)

    def render_cmpl(self, prompts: Sequence[Any], tok_params: TokenizeParams | None = None) -> list[EngineInput]:
        """Each prompt rendered.

        Raises TypeError for what is no prompt, ValueError for one that this model cannot be given.
        """
        params = tok_params or self.default_cmpl_tok_params
        return [self._render(prompt, params) for prompt in prompts]

    def render_chat(
        self,
        conversations: Sequence[Sequence[Any]],
        chat_params: ChatParams | None = None,
        tok_params: TokenizeParams | None = None,
    ) -> tuple[list[list[dict[str, Any]]], list[EngineInput]]:
        """The conversations as the template saw them, and their prompts. Raises ValueError or TypeError."""
        chat, tokenization = chat_params or ChatParams(), tok_params or self.default_chat_tok_params
        seen, inputs = [], []
        for conversation in conversations:
            messages, text = self._apply_template(conversation, chat)
            seen.append(messages)
            inputs.append(self._render({"prompt": text}, tokenization))
        return seen, inputs

    def _apply_template(self, conversation: Sequence[Any], params: ChatParams) -> tuple[list[dict[str, Any]], str]:
        tokenizer = self._need_tokenizer("chat")
        template = tokenizer.get_chat_template(params.chat_template, params.tools)
        content_format = params.chat_template_content_format
        if content_format == "auto":
            content_format = "openai" if reads_content_parts(template) else "string"
        messages = template_messages(plain_conversation(conversation), join_parts=content_format == "string")
        text = render_chat_template(
            template,
            messages,
            tools=params.tools,
            add_generation_prompt=params.add_generation_prompt,
            continue_final_message=params.continue_final_message,
            variables={**tokenizer.special_tokens_map, **params.chat_template_kwargs},
        )
        return messages, text

    def _render(self, prompt: Any, params: TokenizeParams) -> EngineInput:
        arrival_time = time.time()
        if isinstance(prompt, Mapping) and "type" in prompt:
            return self._check_rendered(prompt)
        fields = _parse(prompt)
        if "prompt_embeds" in fields:
            rendered = self._render_embeds(fields["prompt_embeds"], arrival_time)
        else:
            if "prompt_token_ids" in fields:
                token_ids = _checked_ids(fields["prompt_token_ids"])
            else:
                token_ids = self._tokenise(fields["prompt"], params)
            rendered = {"type": "token", "prompt_token_ids": token_ids, "arrival_time": arrival_time}
        rendered = truncate(rendered, params, self.model_config.max_model_len)
        if "prompt" in fields:
            rendered["prompt"] = fields["prompt"]
        if "cache_salt" in fields:
            rendered["cache_salt"] = fields["cache_salt"]
        return rendered

    def _tokenise(self, text: str, params: TokenizeParams) -> list[int]:
        """Raises VLLMValidationError, before anything is tokenised, for a text that cannot fit and is not truncated."""
        tokenizer = self._need_tokenizer("a text prompt")
        limit = self.model_config.max_model_len
        if params.truncate_prompt_tokens is None and len(text) >= limit:
            if (fewest := tokenizer.fewest_tokens(text)) >= limit:
                raise VLLMValidationError(
                    f"the prompt has {len(text)} characters, which are {fewest} tokens at least; with max_model_len "
                    f"{limit} it may have at most {limit - 1}",
                    parameter="input_text",
                    value=len(text),
                )
        return tokenizer.encode(text, add_special_tokens=params.add_special_tokens)

    def _render_embeds(self, value: Any, arrival_time: float) -> EngineInput:
        embeds = _as_float32(value)
        if not self.model_config.enable_prompt_embeds:
            raise ValueError("prompt_embeds need an engine with enable_prompt_embeds=True")
        if embeds.ndim == 3 and embeds.shape[0] == 1:
            embeds = embeds[0]
        hidden_size = int(self.model_config.hf_config["hidden_size"])
        if embeds.ndim != 2 or embeds.shape[1] != hidden_size:
            raise ValueError(f"prompt_embeds must be of shape [num_tokens, {hidden_size}], got {list(embeds.shape)}")
        if not np.isfinite(embeds).all():
            raise ValueError("prompt_embeds must be finite; they hold NaN or infinity")
        return {
            "type": "embeds",
            "prompt_token_ids": [0] * len(embeds),
            "prompt_embeds": embeds,
            "arrival_time": arrival_time,
        }

    def _check_rendered(self, prompt: Mapping[str, Any]) -> EngineInput:
        if prompt["type"] not in ("token", "embeds"):
            raise ValueError(f"a rendered prompt's type is 'token' or 'embeds', got {prompt['type']!r}")
        _check_options(prompt)
        arrival_time = prompt.get("arrival_time")
        if arrival_time is None:
            arrival_time = time.time()
        if prompt["type"] == "embeds":
            rendered = self._render_embeds(prompt.get("prompt_embeds"), arrival_time)
        else:
            token_ids = _checked_ids(prompt.get("prompt_token_ids"))
            rendered = {"type": "token", "prompt_token_ids": token_ids, "arrival_time": arrival_time}
        if prompt.get("prompt") is not None:
            rendered["prompt"] = prompt["prompt"]
        if prompt.get("cache_salt") is not None:
            rendered["cache_salt"] = prompt["cache_salt"]
        return rendered

    def _need_tokenizer(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{purpose} needs a tokenizer, and this engine has none; pass prompt_token_ids")
        return self.tokenizer


def truncate(rendered: EngineInput, params: TokenizeParams, max_model_len: int) -> EngineInput:
    """`rendered` cut to the wanted number of tokens, or of rows of its embeddings.

    Raises VLLMValidationError for more than the model can take.
    """
    wanted = params.truncate_prompt_tokens
    if wanted is None:
        return rendered
    most = max_model_len - 1  # room for one token of output
    if wanted > most:
        raise VLLMValidationError(
            f"truncate_prompt_tokens is {wanted}; it must be at most {most} (max_model_len {max_model_len} less one)",
            parameter="truncate_prompt_tokens",
            value=wanted,
        )
    count = most if wanted == -1 else wanted
    length = len(rendered["prompt_token_ids"])
    if length > count:
        kept = slice(length - count, length) if params.truncation_side == "left" else slice(count)
        rendered["prompt_token_ids"] = rendered["prompt_token_ids"][kept]
        if "prompt_embeds" in rendered:
            rendered["prompt_embeds"] = rendered["prompt_embeds"][kept]
    return rendered


def _parse(prompt: Any) -> dict[str, Any]:
    """The prompt as a dict with one of "prompt", "prompt_token_ids", "prompt_embeds", and checked options."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if _is_message(prompt) or (isinstance(prompt, list) and prompt and _is_message(prompt[0])):
        raise TypeError("this is a chat message, not a prompt: give conversations to LLM.chat, or to a chat template")
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise TypeError(f"a prompt is a str, a list of token ids or a dict, got {_kind(prompt)}")
    if "encoder_prompt" in prompt or "decoder_prompt" in prompt:
        raise TypeError("encoder_prompt and decoder_prompt are for encoder-decoder models; this model is decoder-only")
    if prompt.get("multi_modal_data"):
        raise ValueError("multi_modal_data is given, but this model takes text only")
    fields = {key: prompt[key] for key in _PROMPT_KEYS if prompt.get(key) is not None}
    if not fields.keys() & {"prompt", "prompt_token_ids", "prompt_embeds"}:
        raise TypeError(f"a prompt dict holds 'prompt', 'prompt_token_ids' or 'prompt_embeds', got {sorted(prompt)}")
    _check_options(fields)
    return fields


def _is_message(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and "role" in prompt and not prompt.keys() & {"prompt", "prompt_token_ids"}


def _check_options(fields: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for a prompt's text or salt that is none."""
    for key in ("prompt", "cache_salt"):
        if fields.get(key) is not None and not isinstance(fields[key], str):
            raise TypeError(f"{key!r} of a prompt dict must be a str, got {_kind(fields[key])}")
    if fields.get("cache_salt") == "":
        raise ValueError("cache_salt must not be empty")
    check_encodable(fields.get("cache_salt") or "")


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")


def _checked_ids(value: Any) -> list[int]:
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


def _as_float32(value: Any) -> np.ndarray:
    """An array from an array or a tensor (of any device and float type)."""
    if callable(getattr(value, "detach", None)):
        value = value.detach().cpu().float().numpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"prompt_embeds must be an array or a tensor, got {_kind(value)}")
    if value.dtype.kind not in "fiu":
        raise TypeError(f"prompt_embeds must hold real numbers, got an array of {value.dtype}")
    return np.ascontiguousarray(value, dtype=np.float32)
