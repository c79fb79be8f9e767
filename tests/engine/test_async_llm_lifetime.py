"""`AsyncLLM` and what it lives on: event loops that come and go, the core's death, shutdown, a shared core."""

import asyncio
import gc
import os
import signal
import weakref
from typing import Any

import psutil
import pytest
from async_llm import PROMPT, build_async_llm, collect, frozen_streams, is_idle
from clients import SMALL_ENGINE
from deadlines import DEADLINE
from prompts import greedy

from corespan import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineDeadError,
    EngineGenerateError,
    RequestOutput,
)


def test_an_engine_serves_one_event_loop_after_another(engine: AsyncLLM) -> None:
    runs = [asyncio.run(collect(engine, f"loop-{number}", greedy()))[-1].outputs[0].token_ids for number in range(2)]

    assert runs[0] == runs[1]
    assert len(runs[0]) == 8


def test_a_loop_that_ended_in_the_middle_of_a_stream_leaves_nothing(engine: AsyncLLM) -> None:
    async def leave_early() -> None:
        async for _ in engine.generate(PROMPT, greedy(400), "left"):
            return

    asyncio.run(leave_early())

    assert asyncio.run(is_idle(engine))


def test_a_second_loop_is_refused_while_the_first_runs(engine: AsyncLLM) -> None:
    def use_another_loop() -> Exception:
        with pytest.raises(RuntimeError, match="another event loop") as refused:
            asyncio.run(collect(engine, "second", greedy()))
        return refused.value

    async def use_first_loop() -> list[RequestOutput]:
        await collect(engine, "first", greedy())
        await asyncio.to_thread(use_another_loop)
        return await collect(engine, "first", greedy())

    assert len(asyncio.run(use_first_loop())[-1].outputs[0].token_ids) == 8


@pytest.mark.parametrize("in_thread", [False, True])
def test_shutdown_works_from_any_thread_and_ends_open_streams(make_engine: Any, in_thread: bool) -> None:
    engine = make_engine()

    async def scenario() -> None:
        (stream,) = await frozen_streams(engine, greedy(400))
        if in_thread:
            await asyncio.to_thread(engine.shutdown)
        else:
            engine.shutdown()
        assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine, "after", greedy())

    asyncio.run(scenario())

    engine.shutdown()
    assert engine.errored and engine.is_stopped and not engine.is_running


def test_shutdown_works_without_a_loop(make_engine: Any) -> None:
    engine = make_engine()
    asyncio.run(collect(engine, "only", greedy()))

    engine.shutdown()

    assert isinstance(engine.dead_error, EngineDeadError)


async def test_a_killed_core_fails_every_stream_and_every_later_call_at_once(make_engine: Any) -> None:
    others = set(psutil.Process().children(recursive=True))
    engine = make_engine()
    (core,) = set(psutil.Process().children(recursive=True)) - others
    await engine.check_health()
    streams = await frozen_streams(engine, greedy(400), 3)

    os.kill(core.pid, signal.SIGKILL)

    for stream in streams:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for _ in stream:
                pass
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    with pytest.raises(EngineDeadError):
        await collect(engine, "fourth", greedy())
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()
    await engine.abort("stream-1")
    assert not engine.output_processor.has_unfinished_requests()


async def test_a_failing_output_handler_fails_its_streams_loudly(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    (stream,) = await frozen_streams(engine, greedy(400))

    def broken(*_: Any) -> Any:
        raise ArithmeticError("out of figures")

    monkeypatch.setattr(engine.output_processor, "process_outputs", broken)
    await engine.resume_generation()
    with pytest.raises(EngineGenerateError, match="out of figures"):
        async for _ in stream:
            pass

    with pytest.raises(EngineDeadError, match="out of figures"):
        await engine.check_health()


def test_dropping_the_engine_ends_its_core(tiny_llama_dir: str) -> None:
    others = set(psutil.Process().children(recursive=True))

    async def scenario() -> tuple[Any, psutil.Process]:
        engine = build_async_llm(tiny_llama_dir)
        (core,) = set(psutil.Process().children(recursive=True)) - others
        await collect(engine, "only", greedy())
        reference = weakref.ref(engine)
        del engine
        gc.collect()
        return reference(), core

    left, core = asyncio.run(scenario())

    assert left is None
    psutil.wait_procs([core], timeout=DEADLINE)
    assert not core.is_running()


async def test_two_engines_may_share_one_core(tiny_llama_dir: str) -> None:
    config = AsyncEngineArgs(model=tiny_llama_dir, **SMALL_ENGINE).create_engine_config()
    first = AsyncLLM(config, client_count=2)
    second = AsyncLLM(config, client_count=2, client_index=1, client_addresses=first.client_addresses(1))
    try:
        both = await asyncio.gather(
            collect(first, "same-id", greedy(20)), collect(second, "same-id", greedy(30), "Once upon a time")
        )
        alone = await collect(first, "alone", greedy(30), "Once upon a time")

        assert [len(outputs[-1].outputs[0].token_ids) for outputs in both] == [20, 30]
        assert both[1][-1].outputs[0].token_ids == alone[-1].outputs[0].token_ids
    finally:
        second.shutdown()
        first.shutdown()
