"""From what a user calls a prompt to what the engine takes: token ids or embeddings.

Called by the input processor for raw prompts and by `LLM` for chats; users may call it to prepare requests themselves.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...protocol.config import ModelConfig
from ...protocol.errors import VLLMValidationError
from ...protocol.multimodal import MultiModalFeatureSpec
from ...protocol.param_checks import reject
from ..multimodal.chat_parts import take_pictures, with_placeholders
from ..multimodal.inputs import MultiModalInputs
from .chat_template import reads_content_parts, render_chat_template
from .conversation import plain_conversation, template_messages
from .prompts import EngineInput, as_float32, checked_ids, parse_prompt
from .render_params import ChatParams, TokenizeParams
from .tokenizer import Tokenizer


class Renderer:
    """Tokenises prompts and conversations for one model. Safe to call from several threads."""

    def __init__(
        self, model_config: ModelConfig, tokenizer: Tokenizer | None, multimodal: MultiModalInputs | None = None
    ) -> None:
        """multimodal: of a model that takes pictures."""
        self.model_config = model_config
        self.multimodal = multimodal
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
            prompt: dict[str, Any] = {}
            if self.multimodal is not None and not isinstance(conversation, (str, bytes)):
                conversation, pictures, uuids = take_pictures(conversation, self.multimodal.config)
                if pictures:
                    prompt = {"multi_modal_data": {"image": pictures}, "multi_modal_uuids": {"image": uuids}}
                    prompt["mm_processor_kwargs"] = chat.mm_processor_kwargs
            messages, text = self._apply_template(conversation, chat)
            seen.append(messages)
            inputs.append(self._render({"prompt": text, **prompt}, tokenization))
        return seen, inputs

    def _apply_template(self, conversation: Sequence[Any], params: ChatParams) -> tuple[list[dict[str, Any]], str]:
        tokenizer = self._need_tokenizer("chat")
        template = tokenizer.get_chat_template(params.chat_template, params.tools)
        content_format = params.chat_template_content_format
        if content_format == "auto":
            content_format = "openai" if reads_content_parts(template) else "string"
        plain, join_parts = plain_conversation(conversation), content_format == "string"
        if self.multimodal is not None and join_parts:
            plain = with_placeholders(plain, self.multimodal.processor.image_token)
        kinds = ("text",) if self.multimodal is None else ("text", "image")
        messages = template_messages(plain, join_parts, kinds)
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
        now = time.time()
        fields = parse_prompt(prompt)
        rendered: EngineInput = {
            "type": "token",
            "prompt_token_ids": [],
            "arrival_time": fields.get("arrival_time", now),
        }
        if "prompt_embeds" in fields:
            embeds = self._checked_embeds(fields["prompt_embeds"])
            rendered |= {"type": "embeds", "prompt_token_ids": [0] * len(embeds), "prompt_embeds": embeds}
        elif fields.get("multi_modal_data"):
            self._render_pictures(fields, rendered, params)
        elif "prompt_token_ids" in fields:
            if "mm_features" in fields:
                rendered |= {"type": "multimodal", "mm_features": self._checked_features(fields["mm_features"])}
            rendered["prompt_token_ids"] = checked_ids(fields["prompt_token_ids"])
        else:
            rendered["prompt_token_ids"] = self._tokenise(fields["prompt"], params)
        if "token_type_ids" in fields:
            rendered["token_type_ids"] = checked_ids(fields["token_type_ids"])
        if "prompt" in fields:
            rendered["prompt"] = fields["prompt"]
        if "cache_salt" in fields:
            rendered["cache_salt"] = fields["cache_salt"]
        return _truncate(rendered, params, self.model_config)

    def _checked_features(self, features: Any) -> list[MultiModalFeatureSpec]:
        """Of a prompt that was rendered before."""
        if self.multimodal is None:
            raise ValueError("the rendered prompt is of type 'multimodal', but this model takes text only")
        if not isinstance(features, list) or not all(isinstance(each, MultiModalFeatureSpec) for each in features):
            raise TypeError("mm_features of a rendered prompt must be what the renderer made of its pictures")
        return features

    def _render_pictures(self, fields: dict[str, Any], rendered: EngineInput, params: TokenizeParams) -> None:
        """Raises ValueError, naming the field, for what this model or this engine does not take."""
        if self.multimodal is None:
            raise ValueError("multi_modal_data is given, but this model takes text only")
        names = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
        items = self.multimodal.parse(*(fields.get(name) for name in names))

        def encode(text: str) -> list[int]:
            return self._need_tokenizer("a prompt with pictures").encode(text, add_special_tokens=False)

        if "prompt_token_ids" in fields:
            token_ids, features = self.multimodal.render_ids(checked_ids(fields["prompt_token_ids"]), items, encode)
        else:
            text = fields["prompt"]
            token_ids, features = self.multimodal.render_text(text, items, lambda whole: self._tokenise(whole, params))
        rendered |= {"type": "multimodal", "prompt_token_ids": token_ids, "mm_features": features}

    def _tokenise(self, text: str, params: TokenizeParams) -> list[int]:
        """Raises VLLMValidationError, before anything is tokenised, for a text that cannot fit and is not truncated."""
        tokenizer = self._need_tokenizer("a text prompt")
        most = self.model_config.max_prompt_len
        if params.truncate_prompt_tokens is None and len(text) > most:
            if (fewest := tokenizer.fewest_tokens(text)) > most:
                raise VLLMValidationError(
                    f"the prompt has {len(text)} characters, which are {fewest} tokens at least; with max_model_len "
                    f"{self.model_config.max_model_len} it may have at most {most}",
                    parameter="input_text",
                    value=len(text),
                )
        token_ids = tokenizer.encode(text, add_special_tokens=params.add_special_tokens)
        if self.model_config.pooler is None or params.truncate_prompt_tokens is None:
            return token_ids
        count = most if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
        return token_ids if len(token_ids) <= count else _cut_within(tokenizer, text, params, count)

    def _checked_embeds(self, value: Any) -> np.ndarray:
        """[num_tokens, hidden_size] float32."""
        embeds = as_float32(value)
        if not self.model_config.enable_prompt_embeds:
            raise ValueError("prompt_embeds need an engine with enable_prompt_embeds=True")
        if embeds.ndim == 3 and embeds.shape[0] == 1:
            embeds = embeds[0]
        hidden_size = int(self.model_config.hf_config["hidden_size"])
        if embeds.ndim != 2 or embeds.shape[1] != hidden_size:
            raise ValueError(f"prompt_embeds must be of shape [num_tokens, {hidden_size}], got {list(embeds.shape)}")
        if not np.isfinite(embeds).all():
            raise ValueError("prompt_embeds must be finite; they hold NaN or infinity")
        return embeds

    def _need_tokenizer(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{purpose} needs a tokenizer, and this engine has none; pass prompt_token_ids")
        return self.tokenizer


def _cut_within(tokenizer: Tokenizer, text: str, params: TokenizeParams, count: int) -> list[int]:
    """The text's tokens cut to `count` between what the tokenizer puts in front and behind, which poolers look at."""
    encoding = tokenizer(text, add_special_tokens=params.add_special_tokens, return_special_tokens_mask=True)
    token_ids: list[int] = encoding["input_ids"]
    own = [index for index, added in enumerate(encoding["special_tokens_mask"]) if not added] or [0]
    start, end = own[0], own[-1] + 1
    keep = max(count - start - (len(token_ids) - end), 0)
    kept = token_ids[start : start + keep] if params.truncation_side == "right" else token_ids[end - keep : end]
    return [*token_ids[:start], *kept, *token_ids[end:]]


def _truncate(rendered: EngineInput, params: TokenizeParams, model_config: ModelConfig) -> EngineInput:
    """`rendered` cut to the wanted number of tokens, or of rows of its embeddings.

    Raises VLLMValidationError for more than the model can take.
    """
    wanted = params.truncate_prompt_tokens
    if wanted is None:
        return rendered
    most = model_config.max_prompt_len
    if wanted > most:
        less = "" if most == model_config.max_model_len else " less one"
        raise VLLMValidationError(
            f"truncate_prompt_tokens is {wanted}; it must be at most {most} (max_model_len "
            f"{model_config.max_model_len}{less})",
            parameter="truncate_prompt_tokens",
            value=wanted,
        )
    count = most if wanted == -1 else wanted
    length = len(rendered["prompt_token_ids"])
    if length > count:
        if "mm_features" in rendered:
            reject("truncate_prompt_tokens", wanted, f"None or at least {length}, as a prompt with pictures is not cut")
        kept = slice(length - count, length) if params.truncation_side == "left" else slice(count)
        rendered["prompt_token_ids"] = rendered["prompt_token_ids"][kept]
        if "prompt_embeds" in rendered:
            rendered["prompt_embeds"] = rendered["prompt_embeds"][kept]
        if "token_type_ids" in rendered:
            rendered["token_type_ids"] = rendered["token_type_ids"][kept]
    return rendered
