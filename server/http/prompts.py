"""From a body's prompts and messages to what the engine takes, off the event loop."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ...engine.text.prompts import EngineInput
from ...engine.text.render_params import ChatParams, TokenizeParams
from ..models import ChatSettings, ServedModel
from .errors import ApiError
from .pooling_schema import PooledRequest
from .schema import ChatCompletionRequest, CompletionRequest, GenerationRequest

MAX_PROMPTS = 1024
MAX_MESSAGES = 10_000
_NO_THINKING = "none"


async def completion_prompts(model: ServedModel, request: CompletionRequest) -> list[EngineInput]:
    """Each prompt of the body, tokenised."""
    if request.prompt_embeds is not None:
        raise ApiError("prompt_embeds are not taken over HTTP: send prompt", param="prompt_embeds")
    tok_params = tokenize_params(request, model.renderer.default_cmpl_tok_params)
    prompts = prompt_list(request.prompt, "prompt")
    rendered = await model.in_thread(model.renderer.render_cmpl, prompts, tok_params)
    if request.cache_salt is not None:
        for prompt in rendered:
            prompt["cache_salt"] = request.cache_salt
    return rendered


def tokenize_params(request: GenerationRequest | PooledRequest, defaults: TokenizeParams) -> TokenizeParams:
    return defaults.with_kwargs(
        {
            "truncate_prompt_tokens": request.truncate_prompt_tokens,
            "truncation_side": request.truncation_side,
            "add_special_tokens": request.add_special_tokens,
        }
    )


def prompt_list(given: object, field: str, limit: int = MAX_PROMPTS) -> list[Any]:
    """A text, a list of texts, token ids, or a list of those: as a list of prompts. Raises ApiError naming `field`."""
    if given is None:
        raise ApiError(f"{field} is missing", param=field)
    if isinstance(given, str):
        prompts: list[Any] = [given]
    elif isinstance(given, list) and given and all(type(item) is int for item in given):
        prompts = [given]
    elif isinstance(given, list):
        prompts = given
    else:
        raise ApiError(f"{field} must be a text, a list of texts, token ids or a list of those", param=field)
    if not prompts:
        raise ApiError(f"{field} is empty", param=field)
    if len(prompts) > limit:
        raise ApiError(f"{field} holds {len(prompts)} prompts; at most {limit} are taken at once", param=field)
    for number, item in enumerate(prompts):
        where = f"{field}.{number}" if len(prompts) > 1 else field
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(each) is int for each in item)):
            raise ApiError(f"{where} must be a text or a list of token ids", param=where)
        if not item:
            raise ApiError(f"{where} is empty", param=where)
    return prompts


async def chat_prompt(
    model: ServedModel, request: ChatCompletionRequest, tok_params: TokenizeParams | None = None
) -> EngineInput:
    """The conversation rendered by the chat template and tokenised, as the request says where not by `tok_params`."""
    if not request.messages:
        raise ApiError("messages is empty; it must hold at least one message", param="messages")
    if len(request.messages) > MAX_MESSAGES:
        raise ApiError(f"messages holds more than {MAX_MESSAGES} messages", param="messages")
    params = chat_params(request, model.chat)
    tok_params = tok_params or tokenize_params(request, model.renderer.default_chat_tok_params)
    sees = model.renderer.multimodal is not None
    messages = [template_message(message, sees) for message in request.messages]
    _, (rendered,) = await model.in_thread(model.renderer.render_chat, [messages], params, tok_params)
    if request.cache_salt is not None:
        rendered["cache_salt"] = request.cache_salt
    return rendered


def chat_params(request: ChatCompletionRequest, settings: ChatSettings) -> ChatParams:
    """Raises ApiError for a template of the client's own where the server does not trust it."""
    kwargs = {**settings.chat_template_kwargs, **(request.chat_template_kwargs or {})}
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == _NO_THINKING:
            kwargs.setdefault("enable_thinking", False)
    if request.documents is not None:
        kwargs.setdefault("documents", request.documents)
    if not settings.trust_request_chat_template and (request.chat_template or "chat_template" in kwargs):
        raise ApiError(
            "chat_template is not taken from requests; start the server with --trust-request-chat-template",
            param="chat_template",
        )
    hides_tools = request.tool_choice == "none" and settings.exclude_tools_when_tool_choice_none
    tools = [plain_tool(tool) for tool in request.tools] if request.tools and not hides_tools else None
    continues = bool(request.continue_final_message)
    begins_answer = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if continues and begins_answer:
        raise ApiError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if continues and request.messages[-1].role != "assistant":
        raise ApiError(
            "continue_final_message needs a last message of the role assistant", param="continue_final_message"
        )
    return ChatParams(
        chat_template=request.chat_template or settings.chat_template,
        chat_template_content_format=settings.chat_template_content_format,  # type: ignore[arg-type]
        add_generation_prompt=begins_answer,
        continue_final_message=continues,
        tools=tools,
        chat_template_kwargs=kwargs,
    )


def plain_tool(tool: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(tool)
    return {"type": plain["type"], "function": plain["function"]}


_PICTURES = ("image_url", "input_image")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


def template_message(message: Any, sees: bool = False) -> dict[str, Any]:
    """A message as templates take it. Empty tool calls are dropped, reasoning goes by both of its names, and there is
    content in any case: templates join it to other texts. `sees`: whether a user's may hold pictures.
    """
    plain: dict[str, Any] = {"content": ""} | msgspec.to_builtins(message)
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    if isinstance(content := plain.get("content"), list):
        plain["content"] = [(_part if sees and plain["role"] == "user" else _text_part)(part) for part in content]
        if plain["role"] == "tool":
            plain["content"] = "".join(part["text"] for part in plain["content"])
    if reasoning := plain.get("reasoning") or plain.get("reasoning_content"):
        plain["reasoning"] = plain["reasoning_content"] = reasoning
    return plain


def _part(part: Any) -> dict[str, Any]:
    """A part of a user's message: of text, or a picture, which the renderer takes or refuses."""
    kind = part.get("type") if isinstance(part, dict) else None
    return part if kind in _PICTURES else _text_part(part)


def _text_part(part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise ApiError(f"a message holds a part of type {kind!r}, which is not taken here", param="messages")
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if not isinstance(text, str):
        raise ApiError(f"a message's part of type {kind!r} holds no text", param="messages")
    return {"type": "text", "text": text}


def room_for_output(model: ServedModel, prompts: Sequence[EngineInput], max_tokens: int | None, strict: bool) -> None:
    """Raises ApiError where a prompt leaves less than `max_tokens`, if the server was told to be strict about it."""
    if not strict or max_tokens is None:
        return
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
    if longest + max_tokens > model.max_model_len:
        raise ApiError(
            f"this model's maximum context length is {model.max_model_len} tokens; the prompt has {longest} and "
            f"max_tokens is {max_tokens}",
            param="max_tokens",
            code="context_length_exceeded",
        )
