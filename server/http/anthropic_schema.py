"""The bodies of Anthropic's messages API, and the chats that they ask for. Unknown fields are ignored."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from .errors import ApiError
from .schema import ChatCompletionRequest, ChatMessage, FunctionSpec, Tool, text_field

Block = dict[str, Any]
_BILLING = "x-anthropic-billing-header"
"""How a text block in `system` begins that changes with every request; in a prompt it would defeat the prefix cache."""


class Message(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """`max_tokens` may be missing only where tokens are counted."""

    model: str | None = None
    messages: list[Message]
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


def chat_request(body: MessagesRequest) -> ChatCompletionRequest:
    """The same request as a chat. A last message of the assistant is the beginning of the answer."""
    messages = _chat_messages(body)
    prefilled = bool(messages) and messages[-1].role == "assistant"
    if prefilled and messages[-1].tool_calls:
        raise ApiError("messages: a tool_use must be followed by its tool_result", param="messages")
    choice, config = body.tool_choice, body.output_config or OutputConfig()
    return ChatCompletionRequest(
        model=body.model,
        messages=messages,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        tools=[_chat_tool(tool, number) for number, tool in enumerate(body.tools or ())] or None,
        tool_choice=None if choice is None else _chat_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        continue_final_message=prefilled or None,
        reasoning_effort=config.effort,
        response_format=None if config.format is None else _response_format(config.format),
        chat_template_kwargs=None if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"},
    )


def _chat_tool(tool: AnthropicTool, number: int) -> Tool:
    if tool.input_schema is None:
        raise ApiError(
            f"tools.{number}: this server runs no tools of type {tool.type!r}; a tool needs an input_schema",
            param=f"tools.{number}.input_schema",
        )
    return Tool(function=FunctionSpec(name=tool.name, description=tool.description, parameters=tool.input_schema))


def _chat_tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _response_format(described: dict[str, Any]) -> dict[str, Any]:
    if described.get("type") != "json_schema":
        raise ApiError(
            f"output_config.format.type must be 'json_schema', got {described.get('type')!r}",
            param="output_config.format.type",
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": described.get("schema")}}


def _chat_messages(body: MessagesRequest) -> list[ChatMessage]:
    """System texts first, wherever they stood: most templates take one, at the beginning."""
    system = list(_system_texts(body))
    messages = [ChatMessage(role="system", content="\n".join(system))] if system else []
    for number, message in enumerate(body.messages):
        if message.role == "user":
            messages += _user_messages(message, f"messages.{number}")
        elif message.role == "assistant":
            messages += _assistant_message(message, f"messages.{number}")
    if not body.messages:
        raise ApiError("messages is empty; it must hold at least one message", param="messages")
    return messages


def _system_texts(body: MessagesRequest) -> Iterator[str]:
    if body.system is not None:
        yield from (text for text in _texts(body.system, "system") if not text.startswith(_BILLING))
    for number, message in enumerate(body.messages):
        if message.role == "system":
            yield from _texts(message.content, f"messages.{number}")


def _user_messages(message: Message, where: str) -> Iterator[ChatMessage]:
    """The results of tools first, each a message of its own."""
    if isinstance(message.content, str):
        yield ChatMessage(role="user", content=message.content)
        return
    rest: list[Block] = []
    for number, block in enumerate(message.content):
        if block.get("type") != "tool_result":
            rest.append(block)
            continue
        at = f"{where}.content.{number}"
        result = "\n".join(_texts(block.get("content") or "", at))
        yield ChatMessage(role="tool", content=result, tool_call_id=text_field(block, "tool_use_id", at))
    if rest:
        texts = _texts(rest, where)
        yield ChatMessage(role="user", content="\n".join(texts))


def _assistant_message(message: Message, where: str) -> Iterator[ChatMessage]:
    """Nothing for an empty one, which begins no answer."""
    if isinstance(message.content, str):
        if message.content:
            yield ChatMessage(role="assistant", content=message.content)
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        at = f"{where}.content.{number}"
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(text_field(block, "thinking", at))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": text_field(block, "name", at), "arguments": arguments}
            calls.append({"id": text_field(block, "id", at), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts += _texts([block], at)
    content, reasoning = "".join(texts), "".join(thoughts)
    if content or reasoning or calls:
        yield ChatMessage(
            role="assistant", content=content or None, reasoning=reasoning or None, tool_calls=calls or None
        )


def _texts(content: object, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ApiError(f"{where}: content must be a text or a list of blocks", param=where)
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind != "text":
            raise ApiError(f"{where}: this model takes text only, not a block of type {kind!r}", param=where)
        texts.append(text_field(block, "text", where))
    return texts
