"""A restart in the middle of real requests: every feature that has state continues as if nothing had happened."""

import asyncio
import os
import signal

import pytest

from corespan import AsyncEngineArgs, AsyncLLM, SamplingParams
from corespan.protocol.params import StructuredOutputsParams

FEATURES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11},
    "penalties": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    "logprobs": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "children": {"temperature": 0.8, "seed": 3, "n": 3},
    "grammar": {"temperature": 0.8, "seed": 9, "structured_outputs": StructuredOutputsParams(regex="[a-z]{60}")},
    "bounds": {"temperature": 0.8, "seed": 4, "min_tokens": 30, "bad_words": ["the"]},
}


def params(**options):
    return SamplingParams(max_tokens=150, ignore_eos=options.get("structured_outputs") is None, **options)


@pytest.fixture
def build(tiny_llama_dir):
    built = []

    def build(**options):
        arguments = AsyncEngineArgs(
            model=tiny_llama_dir, max_model_len=256, max_num_seqs=16, num_gpu_blocks_override=257, **options
        )
        built.append(AsyncLLM.from_engine_args(arguments))
        return built[-1]

    yield build
    for engine in built:
        engine.shutdown()


async def generate(engine, name, seen=None):
    """The final completions by index, and the prompt's logprobs; `seen` is set once one holds a few tokens."""
    completions, prompt_logprobs = {}, None
    async for output in engine.generate("Once upon a time", params(**FEATURES[name]), name):
        completions |= {completion.index: completion for completion in output.outputs}
        prompt_logprobs = prompt_logprobs or output.prompt_logprobs
        if seen is not None and len(output.outputs[0].token_ids) > 5:
            seen.set()
    return [completion for _, completion in sorted(completions.items())], prompt_logprobs


async def test_every_stateful_feature_survives_the_core(build):
    undisturbed = build()
    wanted = await asyncio.gather(*(generate(undisturbed, name) for name in FEATURES))
    engine = build(engine_restart=3)
    seen = [asyncio.Event() for _ in FEATURES]
    running = [asyncio.create_task(generate(engine, name, event)) for name, event in zip(FEATURES, seen, strict=True)]
    await asyncio.gather(*(event.wait() for event in seen))
    assert sum(task.done() for task in running) < len(running) / 2
    link = engine.engine_core._supervisor.link
    os.kill(link.process.ready.pid, signal.SIGKILL)
    got = await asyncio.gather(*running)
    assert engine.engine_core._supervisor.link is not link
    for (before, prompt_before), (after, prompt_after) in zip(wanted, got, strict=True):
        for one, other in zip(before, after, strict=True):
            assert (one.index, one.token_ids, one.text) == (other.index, other.token_ids, other.text)
            assert one.finish_reason == other.finish_reason
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None:
                assert [list(step) for step in one.logprobs] == [list(step) for step in other.logprobs]
        assert prompt_before is None or len(prompt_before) == len(prompt_after)
