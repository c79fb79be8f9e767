"""Requests with known answers, and the judgement on what became of them. Used by soak.py."""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 512
MAX_PROBLEMS = 20


@dataclass
class Answer:
    """One of a request's n answers, or as much of it as has come."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    num_logprobs: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, delta: Any) -> None:
        self.tokens += delta.token_ids
        self.text += delta.text
        self.num_logprobs += len(delta.logprobs or ())
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class Case:
    """`answers`: what an undisturbed engine gives. In float32 a batch's company changes nothing."""

    prompt: list[int]
    sampling: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)

    def params(self, delta: bool) -> Any:
        from corespan import RequestOutputKind, SamplingParams

        kind = RequestOutputKind.DELTA if delta else RequestOutputKind.FINAL_ONLY
        return SamplingParams(output_kind=kind, **self.sampling)


class Reading:
    """What has come of one request so far."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.answers = [Answer() for _ in case.answers]

    def take(self, output: Any) -> None:
        for completion in output.outputs:
            self.answers[completion.index].take(completion)


def make_cases(model: str, engine_args: dict[str, Any], count: int, seed: int) -> list[Case]:
    """Greedy and sampled, short and long, with a shared beginning, and with everything that has state: penalties, stop
    strings, log-probabilities, several answers, grammars.
    """
    from corespan import LLM

    rng = random.Random(seed)
    shared = [rng.randrange(4, VOCAB_SIZE) for _ in range(64)]
    cases = [Case(_prompt(rng, shared), _sampling(rng)) for _ in range(count)]
    with LLM(model, **engine_args) as llm:
        prompts = [{"prompt_token_ids": case.prompt} for case in cases]
        outputs = llm.generate(prompts, [case.params(delta=False) for case in cases], use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        case.answers = [Answer() for _ in output.outputs]
        for answer, completion in zip(case.answers, output.outputs, strict=True):
            answer.take(completion)
    return cases


def _prompt(rng: random.Random, shared: list[int]) -> list[int]:
    own = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 100))]
    return [*shared, *own] if rng.random() < 0.3 else own


def _sampling(rng: random.Random) -> dict[str, Any]:
    from corespan import StructuredOutputsParams

    sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 60), "temperature": 0.0, "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.6:
        sampling |= {"temperature": 1.0, "seed": rng.randrange(1 << 40), "top_p": rng.choice([1.0, 0.9])}
        sampling["n"] = rng.choice([1, 1, 1, 3])
    if rng.random() < 0.3:
        sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
    if rng.random() < 0.2:
        sampling |= {"stop": [rng.choice("aeionst")], "min_tokens": min(4, sampling["max_tokens"])}
    if rng.random() < 0.2:
        sampling |= {"logprobs": 2}
    if rng.random() < 0.1:
        sampling |= {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{1,40}"), "ignore_eos": False}
    return sampling


class Verdicts:
    """Thread-safe. `problems` are the first few things that were wrong."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def judge(self, reading: Reading, complete: bool) -> None:
        """`complete`: nobody of this request's own side cut it short. Even so, a pause or sleep may have aborted it."""
        for came, known in zip(reading.answers, reading.case.answers, strict=True):
            if complete and came.finish_reason != "abort":
                right = came == known
            else:
                right = came.tokens == known.tokens[: len(came.tokens)]
            with self._lock:
                self.outcomes[came.finish_reason or "left early"] += 1
            self.expect(right, f"{reading.case.sampling}: {came}, not {known}")

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.fail(problem)

    def fail(self, problem: str) -> None:
        with self._lock:
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(problem)
