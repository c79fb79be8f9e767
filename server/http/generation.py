"""Running the prompts of one HTTP request: ids, headers, several prompts at once, and what their end means."""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence

from starlette.requests import Request

from ...engine.outputs import CompletionOutput, RequestOutput
from ...engine.renderer import EngineInput
from ...protocol.params import SamplingParams
from ..models import ServedModel
from .errors import ApiError, unavailable

_TRACE_HEADERS = ("traceparent", "tracestate")
_PUBLIC_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(request: Request, body_id: str | None = None) -> str:
    """The caller's id where it is one that may be repeated in every event, else one of our own."""
    header = request.headers.get("x-request-id")
    for candidate in (header, body_id):
        if candidate is not None and _PUBLIC_ID.fullmatch(candidate):
            return candidate
    return secrets.token_hex(16)


def priority_of(request: Request, body_priority: int | None) -> int:
    header = request.headers.get("x-vllm-priority")
    if header is None:
        return body_priority or 0
    try:
        return int(header)
    except ValueError:
        raise ApiError(f"X-Vllm-Priority must be an integer, got {header!r}", param="priority") from None


def trace_headers_of(request: Request) -> dict[str, str] | None:
    found = {name: value for name in _TRACE_HEADERS if (value := request.headers.get(name)) is not None}
    return found or None


async def generate(
    model: ServedModel,
    prompts: Sequence[EngineInput],
    params: SamplingParams,
    request_id: str,
    priority: int = 0,
    trace_headers: Mapping[str, str] | None = None,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(number of the prompt, its next output), as they come, until all are finished. Leaving early aborts them all."""
    streams = [
        model.engine.generate(
            prompt,
            params,
            request_id if len(prompts) == 1 else f"{request_id}-{number}",
            priority=priority,
            trace_headers=trace_headers,
        )
        for number, prompt in enumerate(prompts)
    ]
    if len(streams) == 1:
        try:
            async for output in streams[0]:
                yield 0, output
        finally:
            await streams[0].aclose()
        return
    async for numbered in _merged(streams):
        yield numbered


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


def check_finish(output: CompletionOutput) -> None:
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

    def __init__(self, num_prompts: int) -> None:
        self._prompt_tokens = [0] * num_prompts
        self._cached_tokens = [0] * num_prompts
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    def count_prompt(self, number: int, output: RequestOutput) -> None:
        self._prompt_tokens[number] = len(output.prompt_token_ids or ())
        self._cached_tokens[number] = max(self._cached_tokens[number], output.num_cached_tokens or 0)

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
