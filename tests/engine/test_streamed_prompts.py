"""A prompt that comes in pieces: each is answered, the request stays open between them, and ends when it is closed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from async_llm import build_async_llm, is_idle
from odd_errors import ODD_ERRORS, raise_odd

from corespan.engine.async_llm import AsyncLLM
from corespan.engine.outputs.request_output import RequestOutput
from corespan.engine.requests.streaming_input import StreamingInput
from corespan.protocol.errors import EngineGenerateError
from corespan.protocol.params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: str) -> Iterator[AsyncLLM]:
    engine = build_async_llm(tiny_llama_dir, enable_prompt_embeds=True)
    yield engine
    engine.shutdown()


def greedy(kind: RequestOutputKind = DELTA, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 4, "ignore_eos": True, "output_kind": kind} | fields)


async def answer(engine: AsyncLLM, prompt: list[int]) -> list[int]:
    outputs = [output async for output in engine.generate(prompt, greedy(CUMULATIVE), "plain")]
    return outputs[-1].outputs[0].token_ids


PIECES = [[70, 71, 72], [80, 81], [90]]


@pytest.mark.parametrize("in_step", [True, False])
async def test_each_piece_is_answered_behind_all_that_was_said(engine: AsyncLLM, in_step: bool) -> None:
    expected: list[int] = []
    context: list[int] = []
    for piece in PIECES:
        context += piece
        answered = await answer(engine, context)
        expected += answered
        context += answered[:-1]
    answered_pieces = asyncio.Semaphore(1)

    async def pieces() -> AsyncIterator[StreamingInput]:
        for piece in PIECES:
            if in_step:
                await answered_pieces.acquire()
            yield StreamingInput(piece)

    received, last = [], None
    async for output in engine.generate(pieces(), greedy(), "streamed"):
        received += output.outputs[0].token_ids
        last = output
        if output.outputs[0].finish_reason is not None:
            answered_pieces.release()
    assert received == expected
    assert last is not None and last.finished
    assert await is_idle(engine)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
async def test_a_generator_without_a_piece_is_answered_at_once_with_nothing(
    engine: AsyncLLM, kind: RequestOutputKind
) -> None:
    async def nothing() -> AsyncIterator[StreamingInput]:
        for _ in ():
            yield StreamingInput([70])

    (output,) = [output async for output in engine.generate(nothing(), greedy(kind, logprobs=1), "unasked")]
    assert output.request_id == "unasked" and output.finished
    assert output.prompt_token_ids == [] and len(output.outputs) == 1
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.logprobs) == ("", [], "stop", [])
    with pytest.raises(ValueError, match="max_logprobs"):
        await anext(engine.generate(nothing(), greedy(kind, logprobs=21), "refused"))
    assert await is_idle(engine)


async def test_leaving_early_stops_the_generator_of_pieces(engine: AsyncLLM) -> None:
    closed = asyncio.Event()

    async def pieces() -> AsyncIterator[StreamingInput]:
        try:
            yield StreamingInput([70, 71])
            await asyncio.Event().wait()
        finally:
            closed.set()

    stream = engine.generate(pieces(), greedy(), "left")
    await anext(stream)
    await stream.aclose()
    await closed.wait()
    assert await is_idle(engine)


async def test_what_the_generator_raises_reaches_the_reader(engine: AsyncLLM) -> None:
    async def failing() -> AsyncIterator[StreamingInput]:
        yield StreamingInput([70, 71])
        raise LookupError("no more of this")

    async def wrong() -> AsyncIterator[StreamingInput]:
        yield StreamingInput([70, 71])
        yield StreamingInput([-5])

    for pieces, error in ((failing(), LookupError), (wrong(), ValueError)):
        with pytest.raises(error):
            async for _ in engine.generate(pieces, greedy(), "fails"):
                pass
        assert await is_idle(engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 1.0},
        {"output_kind": RequestOutputKind.FINAL_ONLY},
        {"stop": ["x"]},
        {"prompt_logprobs": 1},
    ],
)
async def test_params_that_need_the_whole_prompt_are_refused(engine: AsyncLLM, fields: dict[str, Any]) -> None:
    async def pieces() -> AsyncIterator[StreamingInput]:
        yield StreamingInput([70, 71])

    with pytest.raises(ValueError, match=next(iter(fields))):
        await anext(engine.generate(pieces(), greedy(**fields), "refused"))
    assert await is_idle(engine)


async def test_an_engine_that_restarts_its_core_takes_whole_prompts_only(tiny_llama_dir: str) -> None:
    async def pieces() -> AsyncIterator[StreamingInput]:
        yield StreamingInput([70, 71])

    restarting = build_async_llm(tiny_llama_dir, engine_restart=1)
    try:
        with pytest.raises(ValueError, match="engine_restart"):
            await anext(restarting.generate(pieces(), greedy(), "pieces"))
        assert await is_idle(restarting)
    finally:
        restarting.shutdown()


async def test_a_generator_of_something_else_is_refused(engine: AsyncLLM) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 5

    with pytest.raises(TypeError, match="StreamingInput"):
        await anext(engine.generate(numbers(), greedy(), "numbers"))  # type: ignore[arg-type]


async def test_a_session_that_outgrows_the_model_ends_by_length(engine: AsyncLLM) -> None:
    limit = engine.model_config.max_model_len

    async def pieces() -> AsyncIterator[StreamingInput]:
        while True:
            yield StreamingInput([70] * (limit // 3))

    outputs = [output async for output in engine.generate(pieces(), greedy(), "endless")]
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "length"
    assert await is_idle(engine)


async def last_output(engine: AsyncLLM, inputs: list[StreamingInput], params: SamplingParams) -> RequestOutput:
    """Of a session whose pieces are sent one by one, each when the one before is answered."""
    answered = asyncio.Semaphore(1)

    async def pieces() -> AsyncIterator[StreamingInput]:
        for piece in inputs:
            await answered.acquire()
            yield piece

    async for output in engine.generate(pieces(), params, "streamed"):
        if output.outputs[0].finish_reason is not None:
            answered.release()
    assert output.finished and await is_idle(engine)
    return output


async def test_each_piece_may_have_params_of_its_own(engine: AsyncLLM) -> None:
    own = [
        greedy(CUMULATIVE, max_tokens=3, logit_bias={77: 30.0}),
        greedy(CUMULATIVE, max_tokens=12, temperature=1.0, seed=5),
        greedy(CUMULATIVE, max_tokens=6, temperature=1.0, seed=6, top_k=40, presence_penalty=0.5),
    ]
    expected: list[int] = []
    context: list[int] = []
    for piece, params in zip(PIECES, own, strict=True):
        context += piece
        outputs = [output async for output in engine.generate(context, params, "plain")]
        expected += outputs[-1].outputs[0].token_ids
        context += outputs[-1].outputs[0].token_ids[:-1]

    inputs = [StreamingInput(piece, params) for piece, params in zip(PIECES, own, strict=True)]
    output = await last_output(engine, inputs, greedy(CUMULATIVE))

    assert output.outputs[0].token_ids == expected


async def test_logprobs_of_all_pieces_are_those_of_the_whole(engine: AsyncLLM) -> None:
    params = greedy(CUMULATIVE, logprobs=2)
    streamed = await last_output(engine, [StreamingInput(piece) for piece in PIECES], params)

    outputs = [output async for output in engine.generate(list(streamed.prompt_token_ids), params, "whole")]
    last, whole = streamed.outputs[0], outputs[-1].outputs[0]
    assert len(last.logprobs) == len(last.token_ids) == 12
    for ours, theirs in zip(last.logprobs[8:], whole.logprobs, strict=True):
        assert {token: each.rank for token, each in ours.items()} == {t: each.rank for t, each in theirs.items()}
        values = [[each.logprob for each in entry.values()] for entry in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_pause_between_two_pieces(engine: AsyncLLM, mode: Any) -> None:
    """Keeping or waiting changes nothing; an abort ends the session, though nothing of it runs."""
    undisturbed = await last_output(engine, [StreamingInput(piece) for piece in PIECES], greedy(CUMULATIVE))
    first_answered = asyncio.Event()

    async def pieces() -> AsyncIterator[StreamingInput]:
        yield StreamingInput(PIECES[0])
        await first_answered.wait()
        await engine.pause_generation(mode)
        for piece in PIECES[1:]:
            yield StreamingInput(piece)
        await engine.resume_generation()

    last = None
    async for output in engine.generate(pieces(), greedy(CUMULATIVE), "paused"):
        last = output
        if output.outputs[0].finish_reason is not None:
            first_answered.set()
    await engine.resume_generation()
    assert last is not None and last.finished
    if mode == "abort":
        assert (last.outputs[0].finish_reason, len(last.outputs[0].token_ids)) == ("abort", 4)
    else:
        assert last.outputs[0].token_ids == undisturbed.outputs[0].token_ids
    assert await is_idle(engine)


async def test_sleeping_ends_an_idle_session(engine: AsyncLLM) -> None:
    closed = asyncio.Event()

    async def pieces() -> AsyncIterator[StreamingInput]:
        try:
            yield StreamingInput(PIECES[0])
            await asyncio.Event().wait()
        finally:
            closed.set()

    reasons = []
    async for output in engine.generate(pieces(), greedy(), "asleep"):
        reasons.append(output.outputs[0].finish_reason)
        if reasons[-1] == "length":
            await engine.sleep(1)
    await engine.wake_up()
    await closed.wait()
    assert output.finished and reasons[-1] == "abort"
    assert await is_idle(engine)


async def test_an_abort_by_the_callers_id_ends_a_session_that_waits_for_its_next_piece(engine: AsyncLLM) -> None:
    async def pieces() -> AsyncIterator[StreamingInput]:
        yield StreamingInput(PIECES[0])
        await asyncio.Event().wait()

    reasons = []
    async for output in engine.generate(pieces(), greedy(), "by-name"):
        reasons.append(output.outputs[0].finish_reason)
        if reasons[-1] == "length":
            await engine.abort("by-name")
    assert output.finished and reasons[-1] == "abort"
    assert await is_idle(engine)


@pytest.mark.parametrize("name", [name for name in ODD_ERRORS if name != "StopIteration"])  # a RuntimeError to Python
@pytest.mark.parametrize("first", [True, False])
async def test_whatever_the_generator_raises_is_the_readers_error(engine: AsyncLLM, name: str, first: bool) -> None:
    class Pieces:
        def __init__(self) -> None:
            self.left = [] if first else [StreamingInput(PIECES[0])]

        def __aiter__(self) -> "Pieces":
            return self

        async def __anext__(self) -> StreamingInput:
            if not self.left:
                raise_odd(name)
            return self.left.pop()

    with pytest.raises(EngineGenerateError, match=f"generator of the prompt raised {name}"):
        async for _ in engine.generate(Pieces(), greedy(), "odd"):
            pass
    assert await is_idle(engine)


@pytest.mark.parametrize(
    ("piece", "error", "named"),
    [
        (StreamingInput(PIECES[1], greedy(CUMULATIVE)), ValueError, "output_kind"),
        (StreamingInput(PIECES[1], greedy(logprobs=1)), ValueError, "logprobs"),
        (StreamingInput(PIECES[1], greedy(skip_special_tokens=False)), ValueError, "skip_special_tokens"),
        (StreamingInput(PIECES[1], greedy(stop=["x"])), ValueError, "stop"),
        (StreamingInput(PIECES[1], {"max_tokens": 1}), TypeError, "sampling_params"),  # type: ignore[arg-type]
        (StreamingInput({"prompt_token_ids": PIECES[1], "cache_salt": "other"}), ValueError, "cache_salt"),
        (StreamingInput([]), ValueError, "prompt"),
        (PIECES[1], TypeError, "StreamingInput"),
    ],
)
async def test_a_later_piece_that_cannot_follow_is_the_readers_error(
    engine: AsyncLLM, piece: Any, error: type[Exception], named: str
) -> None:
    async def pieces() -> AsyncIterator[StreamingInput]:
        yield StreamingInput(PIECES[0])
        yield piece

    with pytest.raises(error, match=named):
        async for _ in engine.generate(pieces(), greedy(), "fails"):
            pass
    assert await is_idle(engine)


async def test_embeddings_do_not_come_in_pieces(engine: AsyncLLM) -> None:
    embeds = StreamingInput({"prompt_embeds": np.zeros((3, 64), np.float32)})

    async def pieces(first: StreamingInput) -> AsyncIterator[StreamingInput]:
        yield first
        yield embeds

    for first in (embeds, StreamingInput(PIECES[0])):
        with pytest.raises(ValueError, match="prompt_embeds"):
            async for _ in engine.generate(pieces(first), greedy(), "embeds"):
                pass
    assert await is_idle(engine)
