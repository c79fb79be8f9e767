"""Restarts in the middle of real requests: every feature that has state continues as if nothing had happened."""

import asyncio
import os
import signal

import pytest

from corespan import AsyncEngineArgs, AsyncLLM, RepetitionDetectionParams, SamplingParams
from corespan.protocol.structured_outputs import StructuredOutputsParams

COPIES = 1  # of each kind of request
NUM_KILLS = 3
TOKENS_BETWEEN = 500  # from one core, before it is killed

SEEDED = {"temperature": 0.9, "seed": 11, "top_p": 0.95, "top_k": 100}
FEATURES = {
    "greedy": {"temperature": 0.0},
    "seeded": SEEDED,
    "repetition penalty": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2},
    "other penalties": {"temperature": 0.7, "seed": 5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "prompt logprobs": {"temperature": 0.8, "seed": 2, "logprobs": 1, "prompt_logprobs": 1},
    "children": {"temperature": 0.8, "seed": 3, "n": 3, "logprobs": 0},
    "regex": {"temperature": 0.8, "seed": 9, "structured_outputs": StructuredOutputsParams(regex="[a-z]{60}")},
    "json": {
        "temperature": 0.8,
        "seed": 9,
        "structured_outputs": StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}}),
    },
    "bad words": {"temperature": 0.8, "seed": 4, "bad_words": ["the", " a", "in"]},
    "min tokens": {"temperature": 0.8, "seed": 4, "logit_bias": {1: 100.0}, "min_tokens": 100, "ignore_eos": False},
    "repetition": {
        "temperature": 0.8,
        "seed": 4,
        "logit_bias": {60: 100.0},
        "repetition_detection": RepetitionDetectionParams(4, 1, 110),
    },
    "processor": {"temperature": 0.8, "seed": 6, "extra_args": {"multiple": 2}},
    "stop string": SEEDED,  # the string is taken from the text
}


class Restarted:
    """Kills the core once it has brought forward enough, again and again."""

    def __init__(self, engine, num_kills):
        self.restarting = engine.engine_core._connection
        self.kills_left = num_kills
        self.connection, self.num_tokens = self.restarting.current, 0

    def count(self, num_tokens):
        if self.restarting.current is not self.connection:
            self.connection, self.num_tokens = self.restarting.current, 0
        before, self.num_tokens = self.num_tokens, self.num_tokens + num_tokens
        if before < TOKENS_BETWEEN <= self.num_tokens and self.kills_left:
            self.kills_left -= 1
            os.kill(self.connection.process.ready.pid, signal.SIGKILL)


@pytest.fixture
def build(tiny_llama_dir):
    built = []

    def build(**options):
        arguments = AsyncEngineArgs(
            model=tiny_llama_dir,
            max_model_len=256,
            max_num_seqs=16,
            num_gpu_blocks_override=257,
            logits_processors=["sampler_driver:OnlyMultiplesProcessor"],
            **options,
        )
        built.append(AsyncLLM.from_engine_args(arguments))
        return built[-1]

    yield build
    for engine in built:
        engine.shutdown()


async def generate(engine, name, copy, stop, restarted=None):
    """The final completions by index, and the prompt's logprobs."""
    fields = {"ignore_eos": "structured_outputs" not in FEATURES[name], "max_tokens": 150, **FEATURES[name]}
    completions, prompt_logprobs = {}, None
    params = SamplingParams(**fields, stop=stop if name == "stop string" else None)
    async for output in engine.generate(f"Once upon a time {copy}", params, f"{name} {copy}"):
        num_before = sum(len(completion.token_ids) for completion in completions.values())
        completions |= {completion.index: completion for completion in output.outputs}
        prompt_logprobs = prompt_logprobs or output.prompt_logprobs
        if restarted is not None:
            restarted.count(sum(len(completion.token_ids) for completion in completions.values()) - num_before)
    return [completion for _, completion in sorted(completions.items())], prompt_logprobs


async def generate_all(engine, stops, restarted=None):
    asked = [(name, copy) for copy in range(COPIES) for name in FEATURES]
    answers = await asyncio.gather(
        *(generate(engine, name, copy, stops[copy], restarted) for name, copy in asked),
    )
    return dict(zip(asked, answers, strict=True))


def figures(logprobs):
    """Of all positions, the tokens and their ranks, and the log-probabilities."""
    entries = [(token, entry) for step in logprobs or () for token, entry in (step or {}).items()]
    return [(token, entry.rank) for token, entry in entries], [entry.logprob for _, entry in entries]


def assert_same_figures(before, after):
    tokens, values = figures(before)
    tokens_after, values_after = figures(after)
    assert tokens == tokens_after
    assert values == pytest.approx(values_after, abs=1e-4)


async def test_every_stateful_feature_survives_the_core_again_and_again(build):
    undisturbed = build()
    texts = [(await generate(undisturbed, "seeded", copy, None))[0][0].text for copy in range(COPIES)]
    stops = [text[-20:-14] for text in texts]
    wanted = await generate_all(undisturbed, stops)
    engine = build(engine_restart=NUM_KILLS)
    restarted = Restarted(engine, NUM_KILLS)
    got = await generate_all(engine, stops, restarted)
    assert restarted.kills_left == 0
    for asked, (before, prompt_before) in wanted.items():
        after, prompt_after = got[asked]
        assert len(before) == FEATURES[asked[0]].get("n", 1)
        for one, other in zip(before, after, strict=True):
            assert (one.index, one.token_ids, one.text) == (other.index, other.token_ids, other.text), asked
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason), asked
            assert len(one.logprobs or ()) == (len(one.token_ids) if "logprobs" in FEATURES[asked[0]] else 0)
            assert_same_figures(one.logprobs, other.logprobs)
        assert (prompt_before is None) is ("prompt_logprobs" not in FEATURES[asked[0]])
        assert_same_figures(prompt_before, prompt_after)
    ends = {name: wanted[name, 0][0][0] for name in FEATURES}
    assert ends["stop string"].stop_reason == stops[0]
    assert ends["repetition"].finish_reason == "repetition" and ends["min tokens"].finish_reason == "stop"
