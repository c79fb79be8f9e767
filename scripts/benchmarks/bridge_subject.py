"""One engine as the subject of scripts/bench_bridge: bridge_subject.py KIND MODEL ENGINE_ARGS.

Reads lines "MEASUREMENT COUNT" and answers each with a JSON object of figures.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from workloads import random_requests

ENGINE_ARGS = {
    "max_model_len": 512,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.2,
}
PROMPT_LENGTHS = (8, 24)
TOKENS_MADE = (24, 40)
FIRST_TOKEN_PROMPT = [7, 8, 9]
Figures = dict[str, float]


class SyncSubject:
    """`LLM`, in process or multiprocess."""

    def __init__(self, model: str, engine_args: dict[str, Any]) -> None:
        from corespan import LLM

        self.llm = LLM(model, **engine_args)
        self.engine = self.llm.llm_engine
        self.vocab_size = self.llm.model_config.vocab_size

    def round_trip(self, count: int) -> Figures:
        call = self.engine.engine_core.get_supported_tasks
        return quantiles("round_trip", [timed(call) for _ in range(count)], 1e6, "us")

    def first_token(self, count: int) -> Figures:
        return quantiles("first_token", [timed(self._one_token) for _ in range(count)], 1e6, "us")

    def close(self) -> None:
        self.llm.shutdown()

    def _one_token(self) -> None:
        self.engine.add_request("one", {"prompt_token_ids": FIRST_TOKEN_PROMPT}, sampling_params(1))
        while not self.engine.step():
            pass

    def streams(self, count: int) -> Figures:
        requests = work(count, self.vocab_size)
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [sampling_params(made) for _, made in requests]
        return rates(count, requests, lambda: self.llm.generate(prompts, params, use_tqdm=False))

    def wire(self, count: int) -> Figures:
        """Bytes of the messages that a batch of `count` greedy requests needs, ids as `LLM` makes them."""
        from corespan.protocol.codec import MsgpackEncoder

        encoder = MsgpackEncoder()
        core = self.engine.engine_core
        sent = received = tokens = 0
        for number, (prompt, made) in enumerate(work(count, self.vocab_size)):
            prepared = self.engine.input_processor.process_inputs(
                str(number), {"prompt_token_ids": prompt}, sampling_params(made)
            )
            self.engine.input_processor.assign_request_id(prepared)
            prepared.request.handle = 1 + number
            sent += num_bytes(encoder.encode(prepared.request))
            core.add_request(prepared.request)
            tokens += made
        remaining = tokens
        while remaining:
            outputs = core.get_output()
            received += num_bytes(encoder.encode(outputs))
            remaining -= sum(len(output.new_token_ids) for output in outputs.outputs) + len(outputs.token_ids)
        return {"wire_in_per_token_bytes": received / tokens, "wire_out_per_request_bytes": sent / count}


class AsyncSubject:
    """`AsyncLLM`, one open stream a request, every delta read."""

    def __init__(self, model: str, engine_args: dict[str, Any]) -> None:
        from corespan import AsyncEngineArgs, AsyncLLM

        self.loop = asyncio.new_event_loop()
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **engine_args))
        self.vocab_size = self.engine.model_config.vocab_size

    def round_trip(self, count: int) -> Figures:
        call = self.engine.engine_core.get_supported_tasks
        return quantiles("round_trip", self._run(timed_async(call, count)), 1e6, "us")

    def first_token(self, count: int) -> Figures:
        return quantiles("first_token", self._run(timed_async(self._one_token, count)), 1e6, "us")

    def close(self) -> None:
        self.engine.shutdown()
        self.loop.run_until_complete(asyncio.sleep(0))  # lets the engine's task see the end
        self.loop.close()

    async def _one_token(self) -> None:
        await self._read("one", FIRST_TOKEN_PROMPT, 1)

    def streams(self, count: int) -> Figures:
        requests = work(count, self.vocab_size)

        async def read_all() -> None:
            await asyncio.gather(*(self._read(str(number), *request) for number, request in enumerate(requests)))

        return rates(count, requests, lambda: self._run(read_all()))

    def wire(self, _: int) -> Figures:
        return {}

    async def _read(self, request_id: str, prompt: list[int], made: int) -> None:
        count = 0
        params = sampling_params(made, delta=True)
        async for output in self.engine.generate({"prompt_token_ids": prompt}, params, request_id):
            count += len(output.outputs[0].token_ids)
        if count != made:
            raise RuntimeError(f"{count} tokens came out of a stream of {made}")

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(awaitable)


def sampling_params(max_tokens: int, delta: bool = False) -> Any:
    from corespan import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.DELTA if delta else RequestOutputKind.FINAL_ONLY
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)


def work(count: int, vocab_size: int) -> list[tuple[list[int], int]]:
    requests = random_requests(count, 5, PROMPT_LENGTHS, TOKENS_MADE)
    return [([token_id % vocab_size for token_id in prompt], made) for prompt, made in requests]


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


async def timed_async(action: Callable[[], Awaitable[object]], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        await action()
        seconds.append(time.perf_counter() - began)
    return seconds


def quantiles(name: str, seconds: list[float], scale: float, unit: str) -> Figures:
    points = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"{name}_p50_{unit}": points[49] * scale, f"{name}_p99_{unit}": points[98] * scale}


def rates(count: int, requests: list[tuple[list[int], int]], run: Callable[[], object]) -> Figures:
    """`shell_cpu` is this process's CPU time, which in process includes the model's."""
    tokens = sum(made for _, made in requests)
    cpu_began = time.process_time()
    seconds = timed(run)
    cpu = time.process_time() - cpu_began
    name = f"streams{count}"
    return {f"{name}_tok_s": tokens / seconds, f"{name}_shell_cpu_per_1000_tokens_ms": cpu / tokens * 1e6}


def num_bytes(frames: list[Any]) -> int:
    return sum(len(memoryview(frame).cast("B")) for frame in frames)


def main() -> None:
    kind, model, engine_args = sys.argv[1], sys.argv[2], ENGINE_ARGS | json.loads(sys.argv[3])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if kind == "inproc" else "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    subject = (AsyncSubject if kind == "async" else SyncSubject)(model, engine_args)
    subject.streams(8)
    for line in sys.stdin:
        what, count = line.split()
        print(json.dumps(getattr(subject, what)(int(count))), file=answers, flush=True)
    subject.close()


if __name__ == "__main__":
    main()
