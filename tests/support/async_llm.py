"""`AsyncLLM` as its tests use it: a small engine, a stream read to its end, and whether anything is left."""

from collections.abc import AsyncGenerator
from typing import Any

from clients import ATTEMPTS, SMALL_ENGINE

from corespan import AsyncEngineArgs, AsyncLLM, RequestOutput, SamplingParams

PROMPT = "The capital of France is"


def build_async_llm(model: str, **engine_args: Any) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**{"model": model, "disable_log_stats": True, **SMALL_ENGINE, **engine_args})
    )


async def collect(
    engine: AsyncLLM, request_id: str, params: SamplingParams, prompt: Any = PROMPT
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, request_id)]


async def frozen_streams(
    engine: AsyncLLM, params: SamplingParams, count: int = 1, prompt: Any = PROMPT
) -> list[AsyncGenerator[RequestOutput, None]]:
    """Streams past their first output, of requests that a pause keeps from their end."""
    for _ in range(ATTEMPTS):
        streams = [engine.generate(prompt, params, f"stream-{number}") for number in range(count)]
        for stream in streams:
            await anext(stream)
        await engine.pause_generation(mode="keep")
        if sum(await engine.engine_core.get_request_counts()) == count * params.n:
            return streams
        await (
            engine.resume_generation()
        )  # the core was faster than this program, which the system may have left waiting
        for stream in streams:
            await stream.aclose()
    raise AssertionError(f"{ATTEMPTS} times, requests ended before they were paused")


async def is_idle(engine: AsyncLLM) -> bool:
    processor = engine.output_processor
    tables = (processor.request_states, processor.parent_requests, processor.external_req_ids)
    return (
        not any(tables)
        and await engine.engine_core.get_request_counts() == [0, 0]
        and bool(await engine.reset_prefix_cache())
    )
