"""Streams that nobody reads, and streams that end all at once: what they hold stays small, and nobody else notices."""

import asyncio

import pytest
from async_llm import PROMPT, is_idle
from deadlines import DEADLINE

from corespan import AsyncLLM, RequestOutputKind, SamplingParams

UNREAD_TOKENS = 200


def greedy(max_tokens: int, output_kind: RequestOutputKind = RequestOutputKind.DELTA) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=output_kind)


async def tokens_of(engine: AsyncLLM, request_id: str, max_tokens: int) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate(PROMPT, greedy(max_tokens), request_id):
        tokens += output.outputs[0].token_ids
    return tokens


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
async def test_a_stream_nobody_reads_holds_one_output_and_holds_nobody_up(
    engine: AsyncLLM, kind: RequestOutputKind
) -> None:
    expected = await tokens_of(engine, "alone", UNREAD_TOKENS)

    unread = [await engine.add_request(f"unread-{number}", PROMPT, greedy(UNREAD_TOKENS, kind)) for number in range(8)]
    readers = [tokens_of(engine, f"reader-{number}", 100) for number in range(8)]
    assert await asyncio.gather(*readers) == [expected[:100]] * 8
    await engine.wait_for_requests_to_drain(DEADLINE)

    assert not engine.engine_core._receiver._outputs  # type: ignore[attr-defined]
    for collector in unread:
        output = collector.get_nowait()
        assert output is not None and output.finished
        assert list(output.outputs[0].token_ids) == expected
        assert collector.get_nowait() is None
    assert await is_idle(engine)


async def test_a_thousand_streams_cancelled_at_once_leave_nothing_and_their_neighbours_alone(engine: AsyncLLM) -> None:
    expected = await tokens_of(engine, "alone", 100)
    neighbours = [asyncio.create_task(tokens_of(engine, f"neighbour-{number}", 100)) for number in range(4)]
    doomed = [asyncio.create_task(tokens_of(engine, f"doomed-{number}", 400)) for number in range(1000)]
    while engine.output_processor.get_num_unfinished_requests() < 1000:
        await asyncio.sleep(0)

    for task in doomed:
        task.cancel()
    ends = await asyncio.gather(*doomed, return_exceptions=True)

    assert [type(end) for end in ends] == [asyncio.CancelledError] * 1000
    assert await asyncio.gather(*neighbours) == [expected] * 4
    assert await is_idle(engine)
    assert await engine.reset_prefix_cache()
