"""One response: a chat run spelled as output items, and as the events that build them up."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request

from ..models import ModelHost, ServedModel
from .blocks import Block, BlockEvent, BlockReader, call_id_for
from .chat_run import ChatRun, Step
from .errors import ApiError
from .logprobs import chat_logprobs
from .response_schema import Item, ResponsesRequest, chat_request, input_items, input_messages
from .response_store import StoredResponse

Event = dict[str, Any]


class ResponseRun:
    """`response` is the response object as far as it is; `events` brings it to its end."""

    def __init__(
        self, request: Request, body: ResponsesRequest, earlier: StoredResponse | None, strict_max_tokens: bool
    ) -> None:
        body.check()
        self.body = body
        before: list[Item] = [] if earlier is None else [*earlier.items, *earlier.body["output"]]
        self.items = [*before, *input_items(body)]
        self.chat = chat_request(body, input_messages(before))
        self.run = ChatRun(request, self.chat, "resp_", strict_max_tokens)
        self.num_events = 0
        self.response = self._new_response()
        self._reader = BlockReader()
        self._items: dict[int, Item] = {}
        self._logprobs: list[Any] = []  # of tokens whose text is still to come
        self._text_logprobs: dict[int, list[Any]] = {}

    async def events(self, models: ModelHost) -> AsyncGenerator[Event, None]:
        """Ends with response.completed or response.incomplete. Raises what `ChatRun.steps` raises."""
        async with models.use(self.body.model) as model:
            self.response["model"] = model.name
            finish_reason: str | None = None
            begun = False
            async with aclosing(self.run.steps(model)) as steps:
                async for step in steps:
                    if not begun:
                        begun = True
                        self.response["status"] = "in_progress"
                        for kind in ("created", "in_progress"):
                            yield self._lifecycle(kind)
                    self._take_logprobs(model, step)
                    for read in self._reader.read(step.delta):
                        for event in self._block_events(read):
                            yield event
                    finish_reason = step.finish_reason or finish_reason
            for read in self._reader.finish():
                for event in self._block_events(read):
                    yield event
            self._finish(finish_reason)
            yield self._lifecycle(self.response["status"])

    def fail(self, error: ApiError) -> Event:
        """The last event of a response that failed."""
        self.response |= {"status": "failed", "error": {"code": error.code or "server_error", "message": error.message}}
        return self._lifecycle("failed")

    def error_event(self, error: ApiError) -> Event:
        """What ends a stream that failed."""
        return self._event("error", code=error.code or "server_error", message=error.message, param=error.param)

    def cancel(self) -> None:
        self.response["status"] = "cancelled"

    def _finish(self, finish_reason: str | None) -> None:
        cut_off = finish_reason == "length"
        self.response |= {
            "status": "incomplete" if cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "completed_at": int(time.time()),
            "output": [self._items[index] for index in sorted(self._items)],
            "usage": self._usage(),
        }
        if cut_off and self._items:
            self._items[max(self._items)]["status"] = "incomplete"

    def _take_logprobs(self, model: ServedModel, step: Step) -> None:
        if step.logprobs is not None:
            top = self.chat.top_logprobs or 0
            self._logprobs += chat_logprobs(model.tokenizer, step.token_ids, step.logprobs, top, False)["content"]

    def _block_events(self, read: BlockEvent) -> Iterator[Event]:
        block = read.block
        if read.act == "open":
            item = self._items[block.index] = _new_item(block)
            yield self._event("response.output_item.added", output_index=block.index, item=dict(item))
            if block.kind != "call":
                yield self._in_part(block, "response.content_part.added", part=_part(block, "", []))
        elif read.act == "piece":
            yield self._delta(block, read.text)
        else:
            yield from self._done(block)

    def _delta(self, block: Block, text: str) -> Event:
        if block.kind == "call":
            return self._in_item(block, "response.function_call_arguments.delta", delta=text)
        if block.kind == "reasoning":
            return self._in_part(block, "response.reasoning_text.delta", delta=text)
        logprobs = self._claim_logprobs(block)
        return self._in_part(block, "response.output_text.delta", delta=text, logprobs=logprobs)

    def _claim_logprobs(self, block: Block) -> list[Any]:
        """Those that came since the last text go with this one."""
        claimed, self._logprobs = self._logprobs, []
        self._text_logprobs.setdefault(block.index, []).extend(claimed)
        return claimed

    def _done(self, block: Block) -> Iterator[Event]:
        item, text = self._items[block.index], block.text
        if block.kind == "call":
            item["arguments"] = text
            yield self._in_item(block, "response.function_call_arguments.done", name=block.name, arguments=text)
        elif block.kind == "reasoning":
            yield self._in_part(block, "response.reasoning_text.done", text=text)
        else:
            self._claim_logprobs(block)
            logprobs = self._text_logprobs[block.index]
            yield self._in_part(block, "response.output_text.done", text=text, logprobs=logprobs)
        if block.kind != "call":
            part = _part(block, text, self._text_logprobs.get(block.index, []))
            item["content"] = [part]
            yield self._in_part(block, "response.content_part.done", part=part)
        item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=block.index, item=dict(item))

    def _in_part(self, block: Block, kind: str, **fields: object) -> Event:
        return self._in_item(block, kind, content_index=0, **fields)

    def _in_item(self, block: Block, kind: str, **fields: object) -> Event:
        item_id = self._items[block.index]["id"]
        return self._event(kind, item_id=item_id, output_index=block.index, **fields)

    def _lifecycle(self, kind: str) -> Event:
        return self._event(f"response.{kind}", response=dict(self.response))

    def _event(self, kind: str, **fields: object) -> Event:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}

    def _usage(self) -> dict[str, Any]:
        usage = self.run.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _new_response(self) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.run.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "queued",
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": body.model or "",
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": msgspec.to_builtins(body.reasoning) if body.reasoning else {"effort": None, "summary": None},
            "service_tier": None,
            "store": body.stored,
            "temperature": body.temperature,
            "text": {"format": body.format},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }


def _new_item(block: Block) -> Item:
    token = secrets.token_hex(16)
    if block.kind == "reasoning":
        return {"type": "reasoning", "id": f"rs_{token}", "summary": [], "content": [], "status": "in_progress"}
    if block.kind == "text":
        return {"type": "message", "id": f"msg_{token}", "role": "assistant", "status": "in_progress", "content": []}
    call_id = call_id_for(block, "call_")
    kind = {"type": "function_call", "id": f"fc_{token}", "call_id": call_id}
    return kind | {"name": block.name, "arguments": "", "status": "in_progress"}


def _part(block: Block, text: str, logprobs: list[Any]) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
