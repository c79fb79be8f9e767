"""What `AsyncLLM` counts when streams are left, when the core dies, and when another one takes its place."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
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


async def read(engine: AsyncLLM, request_id: str, max_tokens: int, patience: int | None = None) -> int:
    """How many tokens came, of a stream that is left after `patience` outputs."""
    num_tokens = 0
    stream = engine.generate(PROMPT, greedy(max_tokens), request_id)
    async for output in stream:
        num_tokens += len(output.outputs[0].token_ids)
        patience = None if patience is None else patience - 1
        if patience == 0:
            break
    await stream.aclose()
    return num_tokens


async def figures(engine: AsyncLLM) -> dict[str, Any]:
    """Metrics by name, those of finished requests by reason."""
    return {
        metric.labels.get("finished_reason", metric.name.removeprefix("vllm:")): metric
        for metric in await engine.get_metrics()
    }


async def idle_figures(engine: AsyncLLM) -> dict[str, Any]:
    """`figures` once the core has told that nothing runs. Each round is a message to the core and back."""
    while (await figures(engine))["num_requests_running"].value:
        await engine.engine_core.get_request_counts()
    return await figures(engine)


async def test_streams_that_are_left_count_as_aborted_and_both_bills_agree(make_engine: Any) -> None:
    engine = make_engine()
    left = [read(engine, f"left-{number}", 4000, patience=1) for number in range(5)]
    kept = [read(engine, f"kept-{number}", 12) for number in range(3)]
    await asyncio.gather(*left, *kept)

    found = await idle_figures(engine)
    assert (found["abort"].value, found["length"].value, found["stop"].value) == (5, 3, 0)
    lengths = found["request_generation_tokens"]
    assert (lengths.count, lengths.sum) == (8, found["generation_tokens"].value)
    assert found["request_prompt_tokens"].sum == found["prompt_tokens"].value
    assert found["num_requests_waiting"].value == found["kv_cache_usage_perc"].value == 0


async def test_the_requests_a_core_dies_with_count_as_errors_and_nothing_runs_any_more(make_engine: Any) -> None:
    engine = make_engine()
    streams = [engine.generate(PROMPT, greedy(4000), f"stream-{number}") for number in range(3)]
    num_tokens = 0
    for stream in streams:
        num_tokens += len((await anext(stream)).outputs[0].token_ids)
    await engine.pause_generation(mode="keep")

    os.kill(engine.engine_core._connection.addresses.core_pid, signal.SIGKILL)

    for stream in streams:
        with pytest.raises(EngineDeadError):
            async for output in stream:
                num_tokens += len(output.outputs[0].token_ids)
    found = await figures(engine)
    assert (found["error"].value, found["abort"].value) == (3, 0)
    assert found["request_generation_tokens"].count == 3
    assert found["request_generation_tokens"].sum == found["generation_tokens"].value >= num_tokens
    assert found["num_requests_running"].value == 0


async def test_requests_that_move_to_a_new_core_are_counted_once(make_engine: Any) -> None:
    engine = make_engine(engine_restart=1)
    streams = [engine.generate(PROMPT, greedy(2000), f"stream-{number}") for number in range(3)]
    for stream in streams:
        output = await anext(stream)
    await engine.pause_generation(mode="keep")
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
    assert found["length"].value == found["request_queue_time_seconds"].count == 3
    assert found["generation_tokens"].value == found["request_generation_tokens"].sum == 6000
    assert found["prompt_tokens"].value == found["request_prompt_tokens"].sum == 3 * len(output.prompt_token_ids)
