"""Prompts that come in pieces: an async generator of `StreamingInput` in place of a prompt.

`AsyncLLM` opens a request with the first piece; a task, held by the request's collector, sends the others as they come.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...protocol.errors import EngineGenerateError, VLLMValidationError, as_error_of
from ...protocol.outputs import FinishReason
from ...protocol.param_checks import reject_type
from ...protocol.params import RequestOutputKind, SamplingParams
from ...protocol.requests import EngineCoreRequest
from ..outputs.output_collector import RequestOutputCollector
from ..outputs.output_processor import OutputProcessor
from ..outputs.request_output import CompletionOutput, RequestOutput
from ..text.prompts import PromptType


@dataclass(frozen=True, slots=True)
class StreamingInput:
    """A piece of a prompt, answered before the next one follows. `sampling_params`: the request's own if None."""

    prompt: PromptType
    sampling_params: SamplingParams | None = None


_OF_THE_WHOLE_REQUEST = (
    "output_kind",
    "logprobs",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


_END = object()


class PromptStreamError(Exception):
    """Carries what the caller's generator, or a check of one of its pieces, raised to whoever reads the outputs."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


def check_streamable(params: SamplingParams) -> None:
    """Raises VLLMValidationError for params that make no sense while the prompt is still coming."""
    if params.n > 1:
        _refuse("n", params.n, "1")
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        _refuse("output_kind", params.output_kind, "CUMULATIVE or DELTA")
    if params.stop:
        _refuse("stop", params.stop, "empty")
    if params.prompt_logprobs is not None:
        _refuse("prompt_logprobs", params.prompt_logprobs, "None")


def _refuse(parameter: str, value: object, legal: str) -> None:
    message = f"{parameter} is {value!r}; with a prompt that comes in pieces it must be {legal}"
    raise VLLMValidationError(message, parameter=parameter, value=value)


async def first_piece(pieces: AsyncIterator[Any], params: SamplingParams) -> StreamingInput | None:
    """The piece that opens the request, with its params settled. None where there is none: see `unasked`."""
    piece = await _next_piece(pieces)
    return None if piece is _END else settled(piece, params)


def unasked(request_id: str, params: SamplingParams) -> RequestOutputCollector:
    """The outputs of a request whose prompt has ended before it began: one, finished and empty."""
    check_streamable(params)
    has_logprobs = params.num_logprobs is not None
    answer = CompletionOutput(
        0, "", [], 0.0 if has_logprobs else None, [] if has_logprobs else None, str(FinishReason.STOP)
    )
    collector = RequestOutputCollector(params.output_kind, request_id)
    collector.put(RequestOutput(request_id, None, [], None, [answer], finished=True))
    return collector


def settled(piece: Any, params: SamplingParams) -> StreamingInput:
    """`piece` with params that suit those the request began with. Raises TypeError and VLLMValidationError."""
    if not isinstance(piece, StreamingInput):
        raise TypeError(f"a prompt's generator must yield StreamingInput, not {type(piece).__name__}")
    own = params if piece.sampling_params is None else piece.sampling_params
    if not isinstance(own, SamplingParams):
        reject_type("sampling_params", own, "a SamplingParams")
    check_streamable(own)
    for name in _OF_THE_WHOLE_REQUEST:
        if getattr(own, name) != getattr(params, name):
            _refuse(name, getattr(own, name), f"that of the request, {getattr(params, name)!r}")
    return StreamingInput(piece.prompt, own)


def as_piece(request: EngineCoreRequest, cache_salt: str | None) -> EngineCoreRequest:
    """`request`, open for more prompt. `cache_salt`: what the request began with. Raises VLLMValidationError."""
    if request.prompt_embeds is not None:
        _refuse("prompt_embeds", f"an array of shape {np.shape(request.prompt_embeds)}", "None")
    if request.cache_salt != cache_salt:
        _refuse("cache_salt", request.cache_salt, f"that of the request, {cache_salt!r}")
    request.resumable = True
    return request


Process = Callable[[StreamingInput], Awaitable[tuple[EngineCoreRequest, str | None]]]
Send = Callable[[EngineCoreRequest], Awaitable[None]]


async def send_pieces(
    pieces: AsyncIterator[Any],
    opening: EngineCoreRequest,
    processor: OutputProcessor,
    collector: RequestOutputCollector,
    process: Process,
    send: Send,
) -> None:
    """Send every further piece of the request that `opening` began, and close it behind the last.

    Ends early where the request does. An error goes to the collector.
    """
    try:
        while (piece := await _next_piece(pieces)) is not _END:
            await collector.unanswered_pieces.acquire()
            request, text = await process(settled(piece, opening.sampling_params))
            request = as_piece(request, opening.cache_salt)
            request.request_id, request.external_req_id = opening.request_id, opening.external_req_id
            if not processor.extend_session(request, text):
                return
            await send(request)
        closing = msgspec.structs.replace(opening, prompt_token_ids=[0], resumable=False)
        if processor.extend_session(closing):
            await send(closing)
    except Exception as error:
        collector.put(PromptStreamError(as_error_of("the prompt's processing", error)))


async def _next_piece(pieces: AsyncIterator[Any]) -> Any:
    """What the caller's generator yields next, `_END` behind the last.

    Raises EngineGenerateError in place of what is no error but would end a task, its event loop or the program, unless
    it is the end of this very task.
    """
    task = asyncio.current_task()
    cancelled_before = task.cancelling() if task is not None else 0
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        return _END
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > cancelled_before):
            raise
        call_error = as_error_of("the generator of the prompt", error)
        if call_error is error:
            raise
        raise EngineGenerateError(str(call_error)) from error
