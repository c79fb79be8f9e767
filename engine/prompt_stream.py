"""Prompts that come in pieces: an async generator of `StreamingInput` in place of a prompt.

`AsyncLLM` opens a request with the first piece; a task, held by the request's collector, sends the others as they come.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from ..protocol.errors import EngineGenerateError, as_error_of
from ..protocol.outputs import FinishReason
from ..protocol.params import SamplingParams
from ..protocol.requests import EngineCoreRequest
from .outputs.output_collector import RequestOutputCollector
from .outputs.output_processor import OutputProcessor
from .outputs.request_output import CompletionOutput, RequestOutput
from .requests.prepared_request import PreparedRequest
from .requests.streaming_input import StreamingInput, as_piece, check_streamable, with_params

_END = object()


class PromptStreamError(Exception):
    """Carries what the caller's generator, or a check of one of its pieces, raised to whoever reads the outputs."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


async def first_piece(pieces: AsyncIterator[Any], params: SamplingParams) -> StreamingInput | None:
    """The piece that opens the request, with its params. None where there is none: see `empty_answer`."""
    piece = await _next_piece(pieces)
    return None if piece is _END else with_params(piece, params)


def empty_answer(request_id: str, params: SamplingParams) -> RequestOutputCollector:
    """The outputs of a request whose prompt has ended before it began: one, finished and empty."""
    check_streamable(params)
    has_logprobs = params.num_logprobs is not None
    answer = CompletionOutput(
        0, "", [], 0.0 if has_logprobs else None, [] if has_logprobs else None, str(FinishReason.STOP)
    )
    collector = RequestOutputCollector(params.output_kind, request_id)
    collector.put(RequestOutput(request_id, None, [], None, [answer], finished=True))
    return collector


Process = Callable[[StreamingInput], Awaitable[PreparedRequest]]
Send = Callable[[EngineCoreRequest], Awaitable[None]]


async def send_pieces(
    pieces: AsyncIterator[Any],
    opening: PreparedRequest,
    processor: OutputProcessor,
    collector: RequestOutputCollector,
    process: Process,
    send: Send,
) -> None:
    """Send every further piece of the request that `opening` began, and close it behind the last.

    Ends early where the request does. An error goes to the collector.
    """
    first = opening.request
    try:
        while (piece := await _next_piece(pieces)) is not _END:
            await collector.unanswered_pieces.acquire()
            assert isinstance(opening.params, SamplingParams)
            prepared = await process(with_params(piece, opening.params))
            request = as_piece(prepared.request, first.cache_salt)
            request.request_id, request.external_req_id = first.request_id, first.external_req_id
            if not processor.extend_session(request, prepared.prompt):
                return
            await send(request)
        closing = msgspec.structs.replace(first, prompt_token_ids=[0], resumable=False)
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
