"""The workloads that every engine runs, and the conversation between `scripts/bench` and one engine's process.

Standard library only: it is imported in the peers' virtual environments too. Prompts are random token ids, so that no
engine gains from its tokenizer, and end-of-sequence is ignored, so that all do the same work.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

VOCAB_SIZE = 49152  # SmolLM2's
Request = tuple[list[int], int]  # prompt token ids, number of tokens to generate


@dataclass(frozen=True)
class Workload:
    """`counted` says which tokens its rate is about: those that come out or those that go in."""

    requests: list[Request]
    counted: str
    unit: str

    def tokens(self) -> int:
        return sum(made if self.counted == "out" else len(prompt) for prompt, made in self.requests)


def random_requests(count: int, seed: int, prompt_lengths: tuple[int, int], made: tuple[int, int]) -> list[Request]:
    """`count` requests whose prompt lengths and numbers of new tokens are drawn from the two inclusive ranges."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        length = rng.randint(*prompt_lengths)
        prompt = [rng.randrange(100, VOCAB_SIZE - 100) for _ in range(length)]
        requests.append((prompt, rng.randint(*made)))
    return requests


WARM_UP = random_requests(8, 99, (32, 64), (8, 8))
WORKLOADS = {
    "batch": Workload(random_requests(64, 0, (32, 256), (16, 128)), "out", "batch64_out_tok_s"),
    "single": Workload(random_requests(1, 1, (32, 32), (128, 128)), "out", "single_out_tok_s"),
    "prefill": Workload(random_requests(16, 2, (1000, 1024), (1, 1)), "in", "prefill_in_tok_s"),
}


class Conversation:
    """This process's side: answers go to the original standard output, everything else printed goes to standard error.

    Made before an engine is imported, so that `start_s` counts its import and nothing it prints is taken for an answer.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def serve(self, engine: str, version: str, run: Callable[..., int]) -> None:
        """Introduces the engine, then runs each workload asked for: a line of its name and a JSON object of sampling
        parameters, which `run` takes by name behind the list of requests. It returns how many tokens it generated.
        """
        start_seconds = time.perf_counter() - self.began
        run(WARM_UP)
        self._answer(engine=engine, version=version, start_s=round(start_seconds, 1))
        for line in sys.stdin:
            name, sampling = line.split(maxsplit=1)
            workload, fields = WORKLOADS[name], json.loads(sampling)
            began = time.perf_counter()
            made = run(workload.requests, **fields)
            spent = time.perf_counter() - began
            expected = sum(count for _, count in workload.requests)
            if made != expected:
                raise RuntimeError(f"{engine} generated {made} tokens where {expected} were asked for")
            self._answer(tok_s=workload.tokens() / spent)

    def _answer(self, **fields: object) -> None:
        print(json.dumps(fields), file=self._answers, flush=True)
