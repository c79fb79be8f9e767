"""Running the prompts of one HTTP request: ids, headers, several prompts at once, and what their end means."""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request

from ...engine.outputs.pooling_output import PoolingOutput, PoolingRequestOutput
from ...engine.outputs.request_output import CompletionOutput, RequestOutput
from ...engine.text.prompts import EngineInput
from ...protocol.params import SamplingParams
from ..models import ServedModel
from .errors import ApiError, unavailable
from .pooling_schema import PooledRequest
from .schema import GenerationRequest

_TRACE_HEADERS = ("traceparent", "tracestate")
_PUBLIC_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(request: Request, body_id: str | None = None) -> str:
    """The caller's id where it is one that may be repeated in every event, else one of our own."""
    header = request.headers.get("x-request-id")
    for candidate in (header, body_id):
        if candidate is not None and _PUBLIC_ID.fullmatch(candidate):
            return candidate
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request says of itself: the id that it goes by, its priority, the trace that it belongs to."""

    request_id: str
    priority: int
    trace_headers: Mapping[str, str] | None

    @classmethod
    def of(cls, request: Request, body: GenerationRequest | PooledRequest) -> "Caller":
        """Raises ApiError for a priority that is none."""
        found = {name: value for name in _TRACE_HEADERS if (value := request.headers.get(name)) is not None}
        return cls(request_id_of(request, body.request_id), _priority_of(request, body.priority), found or None)


def _priority_of(request: Request, body_priority: int | None) -> int:
    header = request.headers.get("x-vllm-priority")
    if header is None:
        return body_priority or 0
    try:
        return int(header)
    except ValueError:
        raise ApiError(f"X-Vllm-Priority must be an integer, got {header!r}", param="priority") from None


async def generate(
    model: ServedModel, prompts: Sequence[EngineInput], params: SamplingParams, request_id: str, caller: Caller
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(number of the prompt, its next output), as they come, until all are finished. Closing it early aborts them all.

    Raises what the engine raises, and ApiError for an answer that was cut off rather than finished, and where the model
    does not generate.
    """
    if (pooler := model.engine.model_config.pooler) is not None:
        tasks = ", ".join(pooler.supported_tasks)
        raise ApiError(f"the model {model.name!r} does not generate text; it can be asked: {tasks}", param="model")
    streams = [
        model.engine.generate(
            prompt,
            params,
            request_id if len(prompts) == 1 else f"{request_id}-{number}",
            lora_request=model.adapter,
            priority=caller.priority,
            trace_headers=caller.trace_headers,
        )
        for number, prompt in enumerate(prompts)
    ]
    async with aclosing(_numbered(streams[0]) if len(streams) == 1 else _merged(streams)) as numbered:
        async for number, output in numbered:
            for answer in output.outputs:
                check_finish(answer)
            yield number, output


async def _numbered(
    stream: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with aclosing(stream):
        async for output in stream:
            yield 0, output


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=1)

    async def forward(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for output in stream:
                await queue.put((number, output))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))
        finally:
            await stream.aclose()

    tasks = [asyncio.create_task(forward(number, stream)) for number, stream in enumerate(streams)]
    try:
        remaining = len(tasks)
        while remaining:
            number, output = await queue.get()
            if output is None:
                remaining -= 1
            elif isinstance(output, BaseException):
                raise output
            else:
                yield number, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_finish(output: CompletionOutput | PoolingRequestOutput[PoolingOutput]) -> None:
    """Raises ApiError for an answer that was cut off by the server rather than finished."""
    if output.finish_reason == "abort":
        raise unavailable("the request was aborted: the server is shutting down, paused or going to sleep")
    if output.finish_reason == "error":
        raise ApiError(
            f"generation failed: {output.stop_reason or 'unknown cause'}", 500, headers={"x-should-retry": "false"}
        )


def public_finish_reason(output: CompletionOutput) -> str | None:
    """One of the reasons that OpenAI's clients know; `stop_reason` tells the rest."""
    return "stop" if output.finish_reason == "repetition" else output.finish_reason


class Usage:
    """Token counts of one HTTP request, over all its prompts and answers."""

    def __init__(self, num_prompts: int, counts_answers: bool = True) -> None:
        """`counts_answers` is off where they are not shown."""
        self._counts_answers = counts_answers
        self._prompt_tokens = [0] * num_prompts
        self._cached_tokens = [0] * num_prompts
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    def count(self, number: int, output: RequestOutput) -> None:
        """Takes in an output of prompt `number`."""
        self._prompt_tokens[number] = len(output.prompt_token_ids or ())
        self._cached_tokens[number] = max(self._cached_tokens[number], output.num_cached_tokens or 0)
        if self._counts_answers:
            self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens)

    def body(self) -> dict[str, object]:
        prompt_tokens = self.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
