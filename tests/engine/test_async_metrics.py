"""What `AsyncLLM` counts when streams are left, when the core dies, and when another one takes its place."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from async_llm import collect, frozen_streams
from bridge import FAKE_EXECUTOR, fake_config

from corespan import AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams

PROMPT = {"prompt_token_ids": [1, 2, 3]}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., AsyncLLM]]:
    """The core has no model: a token takes no time worth mentioning."""
    engines = []

    def make(**parallel: Any) -> AsyncLLM:
        config = fake_config(max_model_len=5000, max_num_seqs=4, parallel=parallel)
        engines.append(AsyncLLM(config, FAKE_EXECUTOR, log_stats=True))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


async def figures(engine: AsyncLLM) -> dict[str, Any]:
    """Metrics by name, those of finished requests by reason."""
    return {
        metric.labels.get("finished_reason", metric.name.removeprefix("vllm:")): metric
        for metric in await engine.get_metrics()
    }


async def frozen(engine: AsyncLLM, max_tokens: int, count: int) -> tuple[list[Any], int]:
    """Streams that a pause keeps from their end, and how many it came too late for."""
    streams = await frozen_streams(engine, greedy(max_tokens), count, PROMPT)
    return streams, (await figures(engine))["length"].value


async def idle_figures(engine: AsyncLLM) -> dict[str, Any]:
    """`figures` once the core has told that nothing runs. Each round is a message to the core and back."""
    while (await figures(engine))["num_requests_running"].value:
        await engine.engine_core.get_request_counts()
    return await figures(engine)


async def test_streams_that_are_left_count_as_aborted_and_both_bills_agree(make_engine: Any) -> None:
    engine = make_engine()
    left, before = await frozen(engine, 4000, 4)
    kept = [asyncio.create_task(collect(engine, f"kept-{number}", greedy(12), PROMPT)) for number in range(3)]
    for stream in left:
        await stream.aclose()
    await engine.resume_generation()
    await asyncio.gather(*kept)

    found = await idle_figures(engine)
    assert (found["abort"].value, found["length"].value, found["stop"].value) == (4, before + 3, 0)
    lengths = found["request_generation_tokens"]
    assert (lengths.count, lengths.sum) == (before + 7, found["generation_tokens"].value)
    assert found["request_prompt_tokens"].sum == found["prompt_tokens"].value
    assert found["num_requests_waiting"].value == found["kv_cache_usage_perc"].value == 0


async def test_the_requests_a_core_dies_with_count_as_errors_and_nothing_runs_any_more(make_engine: Any) -> None:
    engine = make_engine()
    streams, before = await frozen(engine, 4000, 3)
    num_tokens = len(streams)

    os.kill(engine.engine_core._connection.addresses.core_pid, signal.SIGKILL)

    for stream in streams:
        with pytest.raises(EngineDeadError):
            async for output in stream:
                num_tokens += len(output.outputs[0].token_ids)
    found = await figures(engine)
    assert (found["error"].value, found["abort"].value) == (3, 0)
    assert found["request_generation_tokens"].count == before + 3
    assert found["request_generation_tokens"].sum == found["generation_tokens"].value >= num_tokens
    assert found["num_requests_running"].value == 0


async def test_requests_that_move_to_a_new_core_are_counted_once(make_engine: Any) -> None:
    engine = make_engine(engine_restart=1)
    streams, before = await frozen(engine, 2000, 3)
    os.kill(engine.engine_core._connection.addresses.core_pid, signal.SIGKILL)
    while True:
        try:
            await engine.resume_generation()
            break
        except EngineDeadError:
            continue
    for stream in streams:
        async for output in stream:
            times = output.metrics
        assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts

    found = await idle_figures(engine)
    assert found["length"].value == found["request_queue_time_seconds"].count == before + 3
    assert found["generation_tokens"].value == found["request_generation_tokens"].sum == 2000 * (before + 3)
    num_prompt_tokens = (before + 3) * len(output.prompt_token_ids)
    assert found["prompt_tokens"].value == found["request_prompt_tokens"].sum == num_prompt_tokens
