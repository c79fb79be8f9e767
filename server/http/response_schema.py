"""The body of the responses API, and the chat that it asks for. Unknown fields are ignored."""

from typing import Any

import msgspec

from .errors import ApiError
from .schema import ChatCompletionRequest, ChatMessage, FunctionSpec, Tool, text_field

Item = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields, and those of vLLM's additions that chats know too."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt: Any = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    truncation: str | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def format(self) -> dict[str, Any]:
        return (self.text.format if self.text else None) or {"type": "text"}

    def check(self) -> None:
        """Raises ApiError for what no chat would find wrong."""
        if self.prompt is not None:
            raise ApiError("prompt is not supported: stored prompts are not kept here", param="prompt")
        if self.background and not self.stored:
            raise ApiError("background needs store to be true", param="background")
        if self.truncation not in (None, "auto", "disabled"):
            raise ApiError(f"truncation must be 'auto' or 'disabled', got {self.truncation!r}", param="truncation")
        if self.structured_outputs is not None and self.format["type"] != "text":
            raise ApiError("text.format and structured_outputs exclude each other", param="structured_outputs")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ApiError(
                f"max_output_tokens must be at least 1, got {self.max_output_tokens}", param="max_output_tokens"
            )


_SHARED = (
    "model parallel_tool_calls stream temperature top_p top_k min_p seed stop ignore_eos structured_outputs priority "
    "request_id cache_salt chat_template_kwargs tool_choice"
).split()
"""Fields that go to the chat as they are."""


def chat_request(body: ResponsesRequest, earlier: list[ChatMessage]) -> ChatCompletionRequest:
    """`earlier`: the conversation so far, without instructions, which hold for one response only."""
    instructions = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return ChatCompletionRequest(
        messages=[*instructions, *earlier, *input_messages(input_items(body))],
        max_completion_tokens=body.max_output_tokens,
        tools=[_chat_tool(tool, number) for number, tool in enumerate(body.tools or ())] or None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        logprobs=True if logprobs else None,
        top_logprobs=body.top_logprobs if logprobs else None,
        response_format=_response_format(body.format),
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        **{name: getattr(body, name) for name in _SHARED},
    )


def _chat_tool(tool: dict[str, Any], number: int) -> Tool:
    if tool.get("type") != "function":
        raise ApiError(
            f"tools.{number}.type must be 'function', got {tool.get('type')!r}: this server runs no tools of its own",
            param=f"tools.{number}.type",
        )
    names = ("name", "description", "parameters", "strict")
    return Tool(function=msgspec.convert({name: tool[name] for name in names if name in tool}, FunctionSpec))


def _response_format(described: dict[str, Any]) -> dict[str, Any] | None:
    """The responses API spells a schema's format flat."""
    if described.get("type") == "text":
        return None
    if described.get("type") != "json_schema":
        return described
    return {"type": "json_schema", "json_schema": {"name": described.get("name"), "schema": described.get("schema")}}


def input_items(body: ResponsesRequest) -> list[Item]:
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    return body.input


def input_messages(items: list[Item]) -> list[ChatMessage]:
    """Items of one turn of the assistant (reasoning, text, calls) become one message."""
    messages: list[ChatMessage] = []
    for number, item in enumerate(items):
        where = f"input.{number}"
        kind = item.get("type", "message")
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            turn = _turn(messages)
            turn.reasoning = (turn.reasoning or "") + "".join(text_field(part, "text", where) for part in parts)
        elif kind == "function_call":
            turn = _turn(messages)
            function = {"name": text_field(item, "name", where), "arguments": text_field(item, "arguments", where)}
            call = {"id": text_field(item, "call_id", where), "type": "function", "function": function}
            turn.tool_calls = [*(turn.tool_calls or ()), call]
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, list) else text_field(item, "output", where)
            call_id = text_field(item, "call_id", where)
            messages.append(ChatMessage(role="tool", content=content, tool_call_id=call_id))
        else:
            raise ApiError(f"{where}.type {kind!r} is not supported", param=f"{where}.type")
    return messages


def _add_message(messages: list[ChatMessage], item: Item, where: str) -> None:
    try:
        message = msgspec.convert({"role": item.get("role"), "content": item.get("content")}, ChatMessage)
    except msgspec.ValidationError as error:
        raise ApiError(f"{where}: {error}", param=where) from None
    if message.role == "assistant" and messages and messages[-1].role == "assistant" and not messages[-1].content:
        messages[-1].content = message.content
    else:
        messages.append(message)


def _turn(messages: list[ChatMessage]) -> ChatMessage:
    """The assistant's message that is being put together."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]
