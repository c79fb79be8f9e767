"""What tests ask an engine for, and what they compare in its answers."""

import random
from collections.abc import Iterable
from typing import Any

from corespan import RequestOutput, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "one two"]


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    """Exactly `max_tokens` tokens, unless `fields` stop them earlier."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def token_ids(length: int, seed: int = 0) -> list[int]:
    """A prompt of `length` ordinary tokens."""
    generator = random.Random(f"{seed}-{length}")
    return [generator.randrange(4, 512) for _ in range(length)]


def tokens(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """Of each output's first answer."""
    return [output.outputs[0].token_ids for output in outputs]
