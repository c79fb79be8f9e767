"""What a step costs beside the model, part by part: greedy requests, of which a few leave and as many join each step.

`schedule` plans the step, `runner` is the model runner under a model that computes nothing, `update` takes the tokens
in, `encode` and `decode` bring them over the wire, `shell` is the output processor without a tokenizer. For each part:
microseconds of CPU time, of which the tenth percentile over the steps since other work on the machine only ever adds;
and the byte codes that Python executes, the mean over the steps in which every request fills a block. Nothing changes
those, but they say nothing of what numpy, msgspec and the kernels do.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

import torch
from subjects import print_columns

from corespan.core.scheduler.request import Request
from corespan.core.scheduler.scheduler import Scheduler
from corespan.core.worker.model_runner import ModelRunner
from corespan.engine.outputs.output_processor import OutputProcessor
from corespan.engine.requests.prepared_request import PreparedRequest
from corespan.protocol.codec import MsgpackDecoder, MsgpackEncoder
from corespan.protocol.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from corespan.protocol.outputs import EngineCoreOutputs
from corespan.protocol.params import RequestOutputKind, SamplingParams
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import resolved

T = TypeVar("T")

PARTS = ("schedule", "runner", "update", "encode", "decode", "shell")
PROMPT_LENGTH = 16
MAX_MODEL_LEN = 2048
VOCAB_SIZE = 64


class NoModel:
    """A runtime that computes nothing: every token is 0."""

    spec = SimpleNamespace(hidden_size=1)
    kv_groups = (None,)  # one, of whatever kind

    def __init__(self, num_reqs: int) -> None:
        self._hidden = torch.zeros(num_reqs * (PROMPT_LENGTH + 1), 1)
        self._logits = torch.zeros(num_reqs, VOCAB_SIZE)

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: Any,
        output_rows: torch.Tensor | None,
        prompt_embeds: Any,
        adapters: Any,
    ) -> torch.Tensor:
        return self._hidden[: len(token_ids if output_rows is None else output_rows)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


class Meter:
    """Runs the parts of a step, timing them or counting their byte codes."""

    def __init__(self) -> None:
        self.counting = False
        self.microseconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self.byte_codes: dict[str, list[int]] = {part: [] for part in PARTS}

    def run(self, part: str, work: Callable[[], T]) -> T:
        if self.counting:
            result, count = counted(work)
            self.byte_codes[part].append(count)
            return result
        began = time.thread_time_ns()
        result = work()
        self.microseconds[part].append((time.thread_time_ns() - began) / 1000)
        return result


class Steps:
    """An engine of parts, stepped in this thread; `num_running` requests run whenever a step begins."""

    def __init__(self, num_running: int, turnover: int) -> None:
        config = make_config(num_running)
        self.scheduler = Scheduler(config, num_running * (MAX_MODEL_LEN // 16) // 4, log_stats=True)
        self.runner = ModelRunner(config, NoModel(num_running))  # type: ignore[arg-type]
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.meter = Meter()
        self._num_running = num_running
        self._numbers = itertools.count()
        self._lifetime = num_running // turnover if turnover else MAX_MODEL_LEN - PROMPT_LENGTH
        for number in range(num_running):  # as if they had joined one after the other
            self._add(self._lifetime - number // turnover if turnover else self._lifetime)
        for _ in range(2):
            self.step()

    def step(self) -> None:
        while len(self.scheduler.table.requests) < self._num_running:
            self._add(self._lifetime)
        run = self.meter.run
        planned = run("schedule", self.scheduler.schedule)
        sampled = run("runner", lambda: self.runner.execute_model(planned))
        outputs = run("update", lambda: self.scheduler.update_from_output(planned, sampled))[0]
        frames = run("encode", lambda: self.encoder.encode(outputs))
        received = run("decode", lambda: self.decoder.decode(frames))
        tokens = zip(received.handles, received.token_ids, strict=True)
        run("shell", lambda: self.output_processor.process_outputs(received.outputs, received.timestamp, None, tokens))

    def _add(self, made: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=made, ignore_eos=True, output_kind=RequestOutputKind.DELTA, detokenize=False
        )
        prompt = [1 + position % 60 for position in range(PROMPT_LENGTH)]
        request = EngineCoreRequest(f"request-{next(self._numbers):08x}", prompt, resolved(params))
        prepared = PreparedRequest(request, params, None, RequestOutputKind.DELTA)
        for each in self.output_processor.add_request(prepared):
            self.scheduler.add_request(Request.from_engine_core_request(each, None))


def make_config(num_running: int) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(
            model="/nowhere",
            served_model_name="none",
            tokenizer=None,
            hf_config={"vocab_size": VOCAB_SIZE},
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=1 << 20, max_num_seqs=num_running, max_model_len=MAX_MODEL_LEN
        ),
    )


def counted(work: Callable[[], T]) -> tuple[T, int]:
    """What `work` returns, and the byte codes it took."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
        return trace

    sys.settrace(trace)
    try:
        result = work()
    finally:
        sys.settrace(None)
    return result, count


def measure(num_running: int, turnover: int, num_steps: int) -> dict[str, Any]:
    steps = Steps(num_running, turnover)
    for _ in range(num_steps):
        steps.step()
    steps.meter.counting = True
    for _ in range(16):
        steps.step()
    times = {part: statistics.quantiles(values, n=10)[0] for part, values in steps.meter.microseconds.items()}
    counts = {part: statistics.mean(values) for part, values in steps.meter.byte_codes.items()}
    row: dict[str, Any] = {"running": num_running, "join and leave": turnover}
    row |= {f"{part}": round(times[part], 1) for part in PARTS} | {"sum us": round(sum(times.values()), 1)}
    return row | {f"{part} codes": round(counts[part]) for part in PARTS} | {"sum codes": round(sum(counts.values()))}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_scheduler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--running", type=int, default=256, metavar="N", help="requests in the batch [%(default)s]")
    add("--turnover", nargs="+", type=int, default=[0, 4], metavar="N", help="that leave and join each step [0 4]")
    add("--steps", type=int, default=400, metavar="N", help="[%(default)s]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(options.running, turnover, options.steps) for turnover in options.turnover]
    for row in rows:
        print(json.dumps(row))
    names = list(rows[0])
    print_columns([[name, *(f"{row[name]:,}" for row in rows)] for name in names])


if __name__ == "__main__":
    main()
