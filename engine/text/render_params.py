"""How a prompt is tokenised and a conversation made text: the caller's options, checked."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...protocol.param_checks import as_bool, int_at_least, reject, reject_type

logger = logging.getLogger("corespan.engine")

_CONTENT_FORMATS = ("auto", "string", "openai")


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
        if kwargs is None:
            return self
        if not isinstance(kwargs, Mapping):
            reject_type("tokenization_kwargs", kwargs, "None or a dict")
        known = {parameter.name for parameter in dataclasses.fields(self)}
        if unknown := sorted(str(name) for name in kwargs if name not in known):
            logger.warning("tokenization_kwargs ignored: %s (known: %s)", ", ".join(unknown), ", ".join(sorted(known)))
        chosen = {name: value for name, value in kwargs.items() if name in known and value is not None}
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
    mm_processor_kwargs: Mapping[str, Any] | None = None  # for the preparation of its pictures

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
