"""The two subjects of bench_serve.py: an engine behind `corespan serve`'s HTTP server, or driven in its own process.

Arguments: a JSON object, see `Subject`. Prints its URL, or one JSON line of figures, on standard output.
"""

import asyncio
import contextlib
import json
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvicorn
import uvloop
from stream_load import prompt_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from bridge import FAKE_EXECUTOR, fake_config  # noqa: E402

from corespan import AsyncEngineArgs, AsyncLLM, SamplingParams  # noqa: E402
from corespan.engine.model_files.model_source import resolve_model  # noqa: E402
from corespan.protocol.params import RequestOutputKind  # noqa: E402
from corespan.server.http.server import Server  # noqa: E402
from corespan.server.models import ServedModel, SingleModel  # noqa: E402
from corespan.server.serve import uvicorn_config  # noqa: E402
from corespan.server.serve_options import ServeOptions  # noqa: E402

PROBE_SECONDS = 0.005


class Subject(msgspec.Struct):
    """`step_seconds`: what a step of the mock engine takes; None: the real model. The rest is for a run in process:
    so many streams of so many tokens, all at once, or one after the other.
    """

    model: str
    step_seconds: float | None = None
    http: bool = True
    streams: int = 1
    tokens: int = 1
    one_by_one: bool = False
    prompt_len: int = 16


def build_engine(subject: Subject) -> AsyncLLM:
    if subject.step_seconds is None:
        arguments = AsyncEngineArgs(model=subject.model, max_num_seqs=64, max_model_len=2048)
        return AsyncLLM.from_engine_args(arguments)
    config = fake_config(
        max_model_len=100_000, max_num_seqs=256, num_gpu_blocks_override=100_000, step_seconds=subject.step_seconds
    )
    tokenizer = resolve_model(subject.model).tokenizer_dir  # so that there is text to be cut and sent
    model_config = msgspec.structs.replace(config.model_config, tokenizer=tokenizer)
    return AsyncLLM(msgspec.structs.replace(config, model_config=model_config), FAKE_EXECUTOR, log_stats=True)


def cpu_seconds() -> tuple[float, float]:
    """The process's own, and the kernel's for it."""
    times = psutil.Process().cpu_times()
    return times.user, times.system


def cpu_since(before: tuple[float, float]) -> dict[str, float]:
    user, system = (now - then for now, then in zip(cpu_seconds(), before, strict=True))
    return {"cpu_s": user + system, "cpu_system_s": system}


async def serve(subject: Subject) -> None:
    """SIGUSR1 begins to record how late the event loop is, and the next one prints that."""
    options = ServeOptions(disable_uvicorn_access_log=True)
    server = Server(options)
    engine = build_engine(subject)
    server.ready(SingleModel(ServedModel(engine, ["served"])))
    listener = uvicorn.Config(app=server, host="127.0.0.1", port=0, log_level="error").bind_socket()  # type: ignore[arg-type]
    http = uvicorn.Server(uvicorn_config(options, server))
    recorder = LagRecorder()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, recorder.toggle)
    loop.add_signal_handler(signal.SIGTERM, lambda: setattr(http, "should_exit", True))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await http._serve(sockets=[listener])
    recorder.stop()
    engine.shutdown()


class LagRecorder:
    """How much later than asked for a timer fires, every few milliseconds."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._cpu = (0.0, 0.0)

    def toggle(self) -> None:
        if self._task is None:
            self._lags.clear()
            self._cpu = cpu_seconds()
            self._task = asyncio.get_running_loop().create_task(self._record())
            return
        figures = cpu_since(self._cpu)
        self.stop()
        ordered = sorted(self._lags) or [0.0]
        p99 = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
        figures |= {"lag_p50_ms": 1000 * statistics.median(ordered), "lag_p99_ms": 1000 * p99}
        print(json.dumps(figures | {"lag_max_ms": 1000 * ordered[-1]}), flush=True)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = None

    async def _record(self) -> None:
        while True:
            due = time.perf_counter() + PROBE_SECONDS
            await asyncio.sleep(PROBE_SECONDS)
            self._lags.append(time.perf_counter() - due)


async def drive(subject: Subject) -> dict[str, Any]:
    """The load of bench_serve.py, without HTTP: the same prompts, the same parameters."""
    engine = build_engine(subject)
    ttfts: list[float] = []

    async def stream(number: int) -> None:
        began, first = time.perf_counter(), True
        params = SamplingParams(
            max_tokens=subject.tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        prompt = {"prompt_token_ids": prompt_of(number, subject.prompt_len)}
        async for _ in engine.generate(prompt, params, f"{began}-{number}"):
            if first:
                ttfts.append(time.perf_counter() - began)
                first = False

    await stream(10_000)
    ttfts.clear()
    cpu, began = cpu_seconds(), time.perf_counter()
    if subject.one_by_one:
        for number in range(subject.streams):
            await stream(number)
    else:
        await asyncio.gather(*(stream(number) for number in range(subject.streams)))
    figures = {"seconds": time.perf_counter() - began, "ttft_p50_s": statistics.median(ttfts), **cpu_since(cpu)}
    engine.shutdown()
    return figures


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Subject)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if given.http:
            runner.run(serve(given))
        else:
            print(json.dumps(runner.run(drive(given))), flush=True)
