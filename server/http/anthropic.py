"""POST /v1/messages and /v1/messages/count_tokens: chats as Anthropic's API spells them."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..models import ServedModel
from .anthropic_schema import MessagesRequest, chat_request
from .blocks import Block, BlockEvent, BlockReader, call_id_for
from .chat_run import ChatRun, Step
from .errors import ApiError
from .hang_up import until_hung_up
from .prompts import chat_prompt
from .responses import encode, json_response, read_body
from .server import server_of
from .sse import event

_PING = {"type": "ping"}


async def create_message(request: Request) -> Response:
    body = await read_body(request, MessagesRequest)
    if body.max_tokens is None:
        raise ApiError("max_tokens is missing; it must be a positive integer", param="max_tokens")
    call = MessageCall(request, body)
    if body.stream:
        return call.server.event_stream(call.events(), call.run.caller.request_id, _error_event, "anthropic")
    return json_response(await until_hung_up(request, call.whole()))


async def count_tokens(request: Request) -> Response:
    chat = chat_request(await read_body(request, MessagesRequest))
    async with server_of(request).models.use(chat.model) as model:
        prompt = await chat_prompt(model, chat)
        return json_response({"input_tokens": len(prompt["prompt_token_ids"])})


class MessageCall:
    """One request, spelled."""

    model: ServedModel  # from when the request holds one

    def __init__(self, request: Request, body: MessagesRequest) -> None:
        self.server = server_of(request)
        self.chat = chat_request(body)
        self.run = ChatRun(request, self.chat, "msg_", self.server.options.strict_max_tokens)
        self._reader = BlockReader()

    async def whole(self) -> dict[str, Any]:
        async with self.server.models.use(self.chat.model) as self.model:
            ending: dict[str, Any] = {}
            async with aclosing(self.run.steps(self.model)) as steps:
                async for step in steps:
                    list(self._reader.read(step.delta))
                    if step.finish_reason is not None:
                        ending = self._ending(step)
            list(self._reader.finish())
            content = [_spelled(block) for block in self._reader.blocks]
            return self._message(content) | ending | {"usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with self.server.models.use(self.chat.model) as self.model:
            begun = False
            ending: dict[str, Any] = {}
            async with aclosing(self.run.steps(self.model)) as steps:
                async for step in steps:
                    events: list[dict[str, Any]] = []
                    if not begun:
                        begun = True
                        start = self._message([]) | {"usage": self._usage()}
                        events = [{"type": "message_start", "message": start}, _PING]
                    events += map(_block_event, self._reader.read(step.delta))
                    if events:
                        yield b"".join(map(_event, events))
                    if step.finish_reason is not None:
                        ending = self._ending(step)
            events = [_block_event(read) for read in self._reader.finish()]
            events += [{"type": "message_delta", "delta": ending, "usage": self._usage()}, {"type": "message_stop"}]
            yield b"".join(map(_event, events))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.run.id,
            "type": "message",
            "role": "assistant",
            "model": self.model.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ending(self, step: Step) -> dict[str, Any]:
        """Why the answer ended. A stop string that hit is told by name."""
        reason, sequence = "end_turn", None
        if step.finish_reason == "length":
            reason = "max_tokens"
        elif any(block.kind == "call" for block in self._reader.blocks):
            reason = "tool_use"
        elif isinstance(step.stop_reason, str) and step.stop_reason in (self.chat.stop or ()):
            reason, sequence = "stop_sequence", step.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        """Cached tokens are counted apart."""
        usage = self.run.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _error_event(error: ApiError) -> bytes:
    return _event(error.body("anthropic"))


def _event(body: dict[str, Any]) -> bytes:
    return event(encode(body), str(body["type"]))


def _spelled(block: Block) -> dict[str, Any]:
    """A block as a whole answer holds it."""
    if block.kind == "call":
        return _opened(block) | {"input": _arguments(block.text)}
    return _opened(block) | {"thinking" if block.kind == "reasoning" else "text": block.text}


def _opened(block: Block) -> dict[str, Any]:
    """A block as its start event holds it: empty."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": call_id_for(block, "toolu_"), "name": block.name, "input": {}}


def _block_event(read: BlockEvent) -> dict[str, Any]:
    block = read.block
    if read.act == "open":
        return {"type": "content_block_start", "index": block.index, "content_block": _opened(block)}
    if read.act == "close":
        return {"type": "content_block_stop", "index": block.index}
    key, kind = {
        "reasoning": ("thinking", "thinking_delta"),
        "text": ("text", "text_delta"),
        "call": ("partial_json", "input_json_delta"),
    }[block.kind]
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, key: read.text}}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments' object; an empty one where `max_tokens` cut them off."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
