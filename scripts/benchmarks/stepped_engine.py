"""An engine in this process whose steps are taken one by one, for the scripts that measure steps."""

import itertools
import os
import random
import statistics
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from corespan import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams


class SteppedEngine:
    """Greedy requests of random tokens, end-of-sequence ignored, no prefix caching; the core runs in this thread."""

    def __init__(self, model: str, **engine_args: object) -> None:
        fixed = {"enable_prefix_caching": False, "disable_log_stats": True}
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **fixed | engine_args))
        self._ids: list[str] = []
        self._numbers = itertools.count()
        self._random = random.Random(0)

    def add(self, count: int, prompt_length: int, made: int) -> None:
        """`made` tokens will come of each, `clear` permitting."""
        params = SamplingParams(
            temperature=0, max_tokens=made, ignore_eos=True, output_kind=RequestOutputKind.DELTA, detokenize=False
        )
        for _ in range(count):
            prompt = [self._random.randrange(100, 1000) for _ in range(prompt_length)]
            name = str(next(self._numbers))
            self._ids.append(name)
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> int:
        """The number of tokens that came out."""
        return sum(len(output.outputs[0].token_ids) for output in self.engine.step())

    def fill(self, count: int, prompt_length: int, steps: int) -> None:
        """Adds requests and steps until `count` tokens come out of a step; `steps` more such steps may follow."""
        self.add(count, prompt_length, steps + 2 + count * prompt_length // 512)
        while self.step() < count:
            pass

    def decode_seconds(self, steps: int) -> float:
        """The median step, after one for good measure."""
        self.step()
        return statistics.median(self._step_seconds() for _ in range(steps))

    def _step_seconds(self) -> float:
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def clear(self) -> None:
        """Ends all requests."""
        self.engine.abort_request(self._ids)
        self._ids.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()
