"""POST /v1/chat/completions: a chat spelled as OpenAI does, whole or as a stream of chunks."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..models import ServedModel
from ..parsers.base import CallDelta
from .chat_run import ChatRun, Step
from .hang_up import until_hung_up
from .logprobs import chat_logprobs, prompt_logprobs_body
from .responses import encode, json_response, read_body
from .schema import ChatCompletionRequest
from .server import server_of
from .sse import DONE, ChunkFrame, event


async def create_chat_completion(request: Request) -> Response:
    body = await read_body(request, ChatCompletionRequest)
    call = ChatCall(request, body)
    if body.stream:
        return call.server.event_stream(call.events(), call.run.caller.request_id)
    return json_response(await until_hung_up(request, call.whole()))


class ChatCall:
    """One request, spelled."""

    model: ServedModel  # from when the request holds one

    def __init__(self, request: Request, body: ChatCompletionRequest) -> None:
        self.server = server_of(request)
        self.body = body
        self.run = ChatRun(request, body, "chatcmpl-", self.server.options.strict_max_tokens)
        self.created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        async with self.server.models.use(self.body.model) as self.model:
            async with aclosing(self.run.steps(self.model)) as steps:
                choices = [self._choice(step) async for step in steps]
            choices.sort(key=lambda choice: int(choice["index"]))
            answer = self._envelope("chat.completion", choices) | {"usage": self.run.usage.body()}
            if self.run.prompt_logprobs is not None:
                answer["prompt_logprobs"] = prompt_logprobs_body(self.run.prompt_logprobs)
            if self.body.return_token_ids and self.run.prompt is not None:
                answer["prompt_token_ids"] = self.run.prompt["prompt_token_ids"]
            return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with self.server.models.use(self.body.model) as self.model:
            shows_usage = self.body.include_usage or self.server.options.enable_force_include_usage
            shared = self._envelope("chat.completion.chunk", [])
            frame = ChunkFrame(shared, null_usage=shows_usage and not self.body.running_usage)
            begun: set[int] = set()
            async with aclosing(self.run.steps(self.model)) as steps:
                async for step in steps:
                    chunks = b""
                    if step.index not in begun:
                        begun.add(step.index)
                        chunks = self._first(frame, step)
                    if (part := self._part(step)) is not None:
                        chunks += frame.event(part, self._running_usage())
                    if chunks:
                        yield chunks
            if shows_usage:
                yield event(encode(shared | {"usage": self.run.usage.body()}))
            yield DONE

    def _running_usage(self) -> dict[str, Any]:
        return {"usage": self.run.usage.body()} if self.body.running_usage else {}

    def _first(self, frame: ChunkFrame, step: Step) -> bytes:
        """The chunk that opens an answer: it names the role, and no later one does."""
        extra = self._running_usage()
        if self.body.return_token_ids and self.run.prompt is not None:
            extra["prompt_token_ids"] = self.run.prompt["prompt_token_ids"]
        delta = {"role": self.model.chat.response_role, "content": ""}
        return frame.event({"index": step.index, "delta": delta, "logprobs": None, "finish_reason": None}, extra)

    def _part(self, step: Step) -> dict[str, Any] | None:
        """What a step adds to its answer; None where that is nothing."""
        delta = self._spelled_delta(step)
        if not delta and step.finish_reason is None and not step.logprobs and not self._shows_ids(step):
            return None
        part: dict[str, Any] = {
            "index": step.index,
            "delta": delta,
            "logprobs": self._logprobs(step),
            "finish_reason": step.finish_reason,
        }
        if step.finish_reason is not None:
            part["stop_reason"] = step.stop_reason
        if self._shows_ids(step):
            part["token_ids"] = step.token_ids
        return part

    def _shows_ids(self, step: Step) -> bool:
        return bool(self.body.return_token_ids and step.token_ids)

    def _spelled_delta(self, step: Step) -> dict[str, Any]:
        spelled: dict[str, Any] = {}
        if step.delta.content:
            spelled["content"] = step.delta.content
        if step.delta.reasoning:
            spelled.update(self._reasoning(step.delta.reasoning))
        if step.delta.calls:
            spelled["tool_calls"] = [_call_delta(call) for call in step.delta.calls]
        return spelled

    def _choice(self, step: Step) -> dict[str, Any]:
        """A whole answer."""
        delta = step.delta
        content: str | None = delta.content
        if delta.calls and not delta.content.strip():
            content = None
        elif delta.reasoning and not delta.content:
            content = None
        message: dict[str, Any] = {
            "role": self.model.chat.response_role,
            "content": self._echoed(content),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if delta.reasoning:
            message.update(self._reasoning(delta.reasoning))
        if delta.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in delta.calls
            ]
        choice: dict[str, Any] = {
            "index": step.index,
            "message": message,
            "logprobs": self._logprobs(step),
            "finish_reason": step.finish_reason,
            "stop_reason": step.stop_reason,
        }
        if self._shows_ids(step):
            choice["token_ids"] = step.token_ids
        return choice

    def _echoed(self, content: str | None) -> str | None:
        """With `echo`, behind the last message, where that is of the answering role."""
        last = self.body.messages[-1]
        if self.body.echo and last.role == self.model.chat.response_role and isinstance(last.content, str):
            return last.content + (content or "")
        return content

    def _reasoning(self, text: str) -> dict[str, str]:
        names = ("reasoning", "reasoning_content")
        chosen = self.server.options.reasoning_field
        return {name: text for name in names if chosen in ("both", name)}

    def _logprobs(self, step: Step) -> dict[str, Any] | None:
        if step.logprobs is None:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids) or self.server.options.return_tokens_as_token_ids
        return chat_logprobs(self.model.tokenizer, step.token_ids, step.logprobs, self.body.top_logprobs or 0, as_ids)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.run.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
            "system_fingerprint": None,
        }


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
