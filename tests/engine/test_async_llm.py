"""Streams of `AsyncLLM`: cancellation, aborts, late consumers, long prompts, pauses."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from async_llm import PROMPT, collect, frozen_streams, is_idle
from deadlines import DEADLINE
from prompts import greedy

from corespan import (
    AsyncLLM,
    CompletionOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from corespan.engine.async_llm import INLINE_PROMPT_LENGTH


async def test_a_cancelled_consumer_aborts_its_request(engine: AsyncLLM) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in engine.generate(PROMPT, greedy(400), "cancelled"):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await is_idle(engine)


async def test_closing_the_generator_aborts_its_request(engine: AsyncLLM) -> None:
    stream = engine.generate(PROMPT, SamplingParams(n=3, max_tokens=400, ignore_eos=True), "closed")
    await anext(stream)

    await stream.aclose()

    assert await is_idle(engine)


@pytest.mark.parametrize("n", [1, 4])
async def test_an_aborted_stream_ends_with_abort_and_what_it_has(engine: AsyncLLM, n: int) -> None:
    params = SamplingParams(n=n, max_tokens=400, ignore_eos=True)
    (stream,) = await frozen_streams(engine, params)

    await engine.abort("stream-0")
    await engine.resume_generation()

    answers: dict[int, CompletionOutput] = {}
    async for output in stream:
        answers |= {each.index: each for each in output.outputs}
    assert {index: each.finish_reason for index, each in answers.items()} == dict.fromkeys(range(n), "abort")
    assert output.finished and any(each.token_ids for each in answers.values())
    assert await is_idle(engine)


async def test_aborting_unknown_ids_is_silent(engine: AsyncLLM) -> None:
    await engine.abort("nobody")
    await engine.abort(["nobody", "knows"])
    await engine.abort("nobody", internal=True)


async def test_invalid_requests_raise_what_is_wrong_and_leave_nothing(engine: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="600"):
        await collect(engine, "too-big", greedy(), {"prompt_token_ids": [600]})
    with pytest.raises(TypeError, match="SamplingParams"):
        await collect(engine, "no-params", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="request_id"):
        await collect(engine, 5, greedy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data_parallel_rank must be None or 0"):
        await anext(engine.generate("one two", greedy(), "elsewhere", data_parallel_rank=1))
    async for _ in engine.generate("one two", greedy(), "here", data_parallel_rank=0):
        pass

    assert await is_idle(engine)


async def test_tokenising_a_long_prompt_holds_nobody_up(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    release, entered = threading.Event(), threading.Event()
    encode = engine.tokenizer.encode

    def blocking_encode(text: str, *arguments: Any, **options: Any) -> list[int]:
        if len(text) > INLINE_PROMPT_LENGTH:
            entered.set()
            assert release.wait(DEADLINE)
            text = PROMPT
        return encode(text, *arguments, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", blocking_encode)
    expected = await collect(engine, "short", greedy())
    long = asyncio.create_task(collect(engine, "long", greedy(), "a" * (INLINE_PROMPT_LENGTH + 1)))
    while not entered.is_set():
        await asyncio.sleep(0)

    meanwhile = await collect(engine, "meanwhile", greedy())

    assert not long.done()
    release.set()
    assert (await long)[-1].outputs[0].token_ids == meanwhile[-1].outputs[0].token_ids
    assert meanwhile[-1].outputs[0].token_ids == expected[-1].outputs[0].token_ids


async def test_checking_a_grammar_holds_nobody_up(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from corespan.shared import grammar

    release, entered = threading.Event(), threading.Event()

    def blocking_check(*_: Any) -> str:
        entered.set()
        assert release.wait(DEADLINE)
        return grammar_text(StructuredOutputsParams(regex="slowly"))

    grammar_text = grammar.grammar_text
    monkeypatch.setattr(grammar, "grammar_text", blocking_check)
    constrained = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="slowly"))
    slow = asyncio.create_task(collect(engine, "slow", constrained))
    while not entered.is_set():
        await asyncio.sleep(0)

    await collect(engine, "meanwhile", greedy())

    assert not slow.done()
    release.set()
    assert (await slow)[-1].outputs[0].text == "slowly"


async def test_a_request_cancelled_while_its_prompt_is_tokenised_is_never_sent(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, entered = threading.Event(), threading.Event()

    def blocking_encode(*_: Any, **__: Any) -> list[int]:
        entered.set()
        assert release.wait(DEADLINE)
        return [5]

    monkeypatch.setattr(engine.tokenizer, "encode", blocking_encode)
    task = asyncio.create_task(collect(engine, "early", greedy(), "a" * (INLINE_PROMPT_LENGTH + 1)))
    while not entered.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()

    assert await is_idle(engine)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "sleep"])
async def test_no_output_follows_a_pause_that_has_returned(
    engine: AsyncLLM, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first has been read, outputs are handled only when the core has answered the pause."""
    count = 0
    answered = asyncio.Event()
    handle, utility = engine._output_handler._handle, "sleep" if mode == "sleep" else "pause_scheduler"
    call = getattr(engine.engine_core, utility)

    async def handle_late(outputs: Any) -> None:
        if count:
            await answered.wait()
        await handle(outputs)

    async def call_and_tell(*args: Any) -> None:
        await call(*args)
        answered.set()

    monkeypatch.setattr(engine._output_handler, "_handle", handle_late)
    monkeypatch.setattr(engine.engine_core, utility, call_and_tell)

    async def read(number: int) -> None:
        nonlocal count
        async for _ in engine.generate(PROMPT, greedy(40), f"read-{number}"):
            count += 1

    readers = [asyncio.create_task(read(number)) for number in range(8)]
    while count == 0:
        await asyncio.sleep(0)
    await (engine.sleep(0) if mode == "sleep" else engine.pause_generation(mode=mode))
    at_return = count
    await engine.is_paused()
    for _ in range(100):
        await asyncio.sleep(0)
    assert count == at_return
    await engine.resume_generation()
    await asyncio.gather(*readers)
    assert await is_idle(engine)


async def test_a_request_made_while_asleep_runs_after_waking(engine: AsyncLLM) -> None:
    expected = (await collect(engine, "awake", greedy()))[-1].outputs[0].token_ids

    await engine.sleep(1)
    task = asyncio.create_task(collect(engine, "asleep", greedy()))
    await asyncio.sleep(0)
    assert await engine.is_sleeping()
    await engine.wake_up()

    output = (await task)[-1]
    assert output.outputs[0].token_ids == expected
    assert output.num_cached_tokens == 0


async def test_prompts_may_not_be_streams_of_something_else(engine: AsyncLLM) -> None:
    async def pieces() -> AsyncIterator[int]:
        yield 5

    with pytest.raises(TypeError):
        await collect(engine, "pieces", greedy(), pieces())
