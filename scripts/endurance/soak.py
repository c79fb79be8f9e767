"""A seeded mix of everything on a tiny random model, for a while: AsyncLLM over unix sockets and LLMEngine over TCP,
with priorities, side by side; streams left early, aborts, prompts that are refused, pauses, sleeps, utility calls, and
cores killed and restarted.

Every request's answers are known beforehand from an undisturbed run, so that one that is lost, doubled or wrong shows.
At the end nothing may be left: no request, no block in use, no process, thread, descriptor or folder, and memory must
not have grown. Prints one JSON line; the exit status is 0 when all of it holds.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from footprint import Footprint, slope, take_footprint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from cases import Case, Reading, Verdicts, make_cases

ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 129,  # few enough that requests are preempted
    "disable_log_stats": True,
    "engine_restart": 10_000,
}
SYNC_ENGINE_ARGS = ENGINE_ARGS | {"scheduling_policy": "priority", "core_address": "tcp://127.0.0.1"}
NUM_STREAMS = 24
NUM_CASES = 150
KILL_INTERVAL = (8.0, 20.0)
CONTROL_INTERVAL = (0.3, 2.0)
WARM_UP = 0.25  # of the time, in which memory may still grow
MAX_GROWTH = 24.0  # MB of the shell's memory afterwards
SETTLING_TIME = 30.0


class Soak:
    """One run. `counts` says how often what was done; `verdicts` holds what was wrong."""

    def __init__(self, model: str, seconds: float, seed: int) -> None:
        self.model = model
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.verdicts = Verdicts()
        self.footprints: list[Footprint] = []
        self.cases = make_cases(model, ENGINE_ARGS, NUM_CASES, seed)
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self._progress: Counter[str] = Counter()  # requests that have ended since the last kill, by engine

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def over(self) -> bool:
        return time.monotonic() > self.deadline

    def judge(self, engine: str, reading: Reading, complete: bool) -> None:
        self._progress[engine] += 1
        self.verdicts.judge(reading, complete)

    # AsyncLLM

    async def run(self) -> None:
        from corespan import AsyncEngineArgs, AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=self.model, **ENGINE_ARGS))
        sync_part = threading.Thread(target=self.run_sync, name="soak-sync")
        sync_part.start()
        try:
            background = [asyncio.ensure_future(part) for part in (self.kill(), self.watch(), self.control(engine))]
            await asyncio.gather(*(self.stream(engine, number) for number in range(NUM_STREAMS)))
            await asyncio.gather(*background)
            await asyncio.to_thread(sync_part.join)
            async with asyncio.timeout(SETTLING_TIME):
                await self.check_idle(engine)
        finally:
            engine.shutdown()

    async def stream(self, engine: Any, number: int) -> None:
        rng = self.rng(f"stream {number}")
        while not self.over():
            case = rng.choice(self.cases)
            patience = rng.randint(0, 20) if rng.random() < 0.3 else None
            request_id = f"{number}-{self.counts['streams']}"
            self.counts["streams"] += 1
            await self.read(engine, case, request_id, patience, by_name=rng.random() < 0.5)
            if rng.random() < 0.02:
                await self.refuse(engine, request_id)

    async def read(self, engine: Any, case: Case, request_id: str, patience: int | None, by_name: bool) -> None:
        """One request to its end, or left after `patience` outputs: aborted by its id or by closing the stream."""
        reading = Reading(case)
        stream = engine.generate({"prompt_token_ids": case.prompt}, case.params(delta=True), request_id)
        async for output in stream:
            reading.take(output)
            patience = None if patience is None else patience - 1
            if patience is not None and patience <= 0 and not output.finished:
                self.counts["left early"] += 1
                if not by_name:
                    break
                await engine.abort(request_id)
        await stream.aclose()
        self.judge("async", reading, complete=patience is None)

    async def refuse(self, engine: Any, request_id: str) -> None:
        too_long = {"prompt_token_ids": [7] * ENGINE_ARGS["max_model_len"]}
        self.counts["refused"] += 1
        try:
            async for _ in engine.generate(too_long, self.cases[0].params(delta=True), request_id):
                pass
        except ValueError:
            return
        self.verdicts.fail("a prompt that is too long was not refused")

    async def control(self, engine: Any) -> None:
        rng = self.rng("control")
        while not self.over():
            await asyncio.sleep(rng.uniform(*CONTROL_INTERVAL))
            await self.one_control(engine, rng)
        await engine.wake_up()

    async def one_control(self, engine: Any, rng: random.Random) -> None:
        """Each may find the core dead, in which case it fails."""
        from corespan.protocol.errors import EngineDeadError

        mode = rng.choice(["keep", "wait", "abort", "keep", "wait"])
        name = rng.choice(["counts", "reset", "pause", "sleep 1", "sleep 2", "rpc", "burst"])
        self.counts[name] += 1
        try:
            if name == "counts":
                await engine.engine_core.get_request_counts()
            elif name == "reset":
                await engine.reset_prefix_cache()
            elif name == "rpc":
                await asyncio.gather(*(engine.engine_core.get_supported_tasks() for _ in range(50)))
            elif name == "burst":
                await self.cancel_many(engine, rng)
            elif name == "pause":
                await engine.pause_generation(mode)
                await asyncio.sleep(rng.uniform(0, 0.2))
            else:
                await engine.sleep(int(name[-1]), mode)
                await asyncio.sleep(rng.uniform(0, 0.2))
        except EngineDeadError:
            self.counts["controls that a core died in"] += 1
        finally:
            if name == "pause" or name.startswith("sleep"):
                await self.wake(engine)

    async def wake(self, engine: Any) -> None:
        from corespan.protocol.errors import EngineDeadError

        while True:
            try:
                await engine.wake_up()
                return
            except EngineDeadError:
                self.counts["controls that a core died in"] += 1

    async def cancel_many(self, engine: Any, rng: random.Random) -> None:
        tasks = []
        for _ in range(100):
            request_id = f"burst-{self.counts['burst requests']}"
            self.counts["burst requests"] += 1
            case = rng.choice(self.cases)
            tasks.append(asyncio.create_task(self.read(engine, case, request_id, 1_000_000, by_name=False)))
        await asyncio.sleep(rng.uniform(0, 0.1))
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                self.verdicts.fail(f"a cancelled request raised {outcome!r}")

    async def check_idle(self, engine: Any) -> None:
        running, waiting = await engine.engine_core.get_request_counts()
        self.verdicts.expect(running + waiting == 0, f"{running} running, {waiting} waiting in the async core")
        processor = engine.output_processor
        tables = (processor.request_states, processor.parent_requests, processor.external_req_ids)
        self.verdicts.expect(not any(tables), "the async shell still knows requests")
        self.verdicts.expect(await engine.reset_prefix_cache(), "blocks of the async core are still in use")

    # LLMEngine

    def run_sync(self) -> None:
        from corespan import EngineArgs
        from corespan.engine.llm_engine import LLMEngine

        arguments = EngineArgs(model=self.model, **SYNC_ENGINE_ARGS)
        engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=True)
        rng = self.rng("sync")
        try:
            while not self.over():
                self.run_batch(engine, rng)
            running, waiting = engine.engine_core.get_request_counts()
            self.verdicts.expect(running + waiting == 0, f"{running} running, {waiting} waiting in the sync core")
            self.verdicts.expect(engine.reset_prefix_cache(), "blocks of the sync core are still in use")
        except Exception as error:
            self.verdicts.fail(f"the sync engine failed: {error!r}")
        finally:
            engine.shutdown()

    def run_batch(self, engine: Any, rng: random.Random) -> None:
        """Up to 40 requests, of which some are aborted while they run."""
        running: dict[str, Reading] = {}
        for _ in range(rng.randint(1, 40)):
            case = rng.choice(self.cases)
            request_id = f"sync-{self.counts['sync requests']}"
            self.counts["sync requests"] += 1
            running[request_id] = Reading(case)
            prompt = {"prompt_token_ids": case.prompt}
            engine.add_request(request_id, prompt, case.params(delta=True), priority=rng.randint(-2, 2))
        while running:
            for output in engine.step():
                running[output.request_id].take(output)
                if output.finished:
                    self.judge("sync", running.pop(output.request_id), complete=True)
            if running and rng.random() < 0.05:
                request_id = rng.choice(list(running))
                engine.abort_request([request_id])
                self.counts["sync aborts"] += 1
                self.judge("sync", running.pop(request_id), complete=False)

    # What is done to the cores, and what they take

    async def kill(self) -> None:
        """Both cores get time to show some progress first: a request is given up when two of them die before its second
        token.
        """
        rng = self.rng("kill")
        while not self.over():
            await asyncio.sleep(rng.uniform(*KILL_INTERVAL))
            cores = psutil.Process().children()
            if cores and min(self._progress["async"], self._progress["sync"]) > 2 * NUM_STREAMS and not self.over():
                self._progress.clear()
                self.counts["kills"] += 1
                rng.choice(cores).send_signal(rng.choice([signal.SIGKILL, signal.SIGSEGV]))

    async def watch(self) -> None:
        while not self.over():
            gc.collect()
            self.footprints.append(take_footprint())
            await asyncio.sleep(1.0)

    def report(self, before: Footprint, after: Footprint) -> dict[str, Any]:
        late = [each for each in self.footprints if each.seconds - self.began > WARM_UP * (self.deadline - self.began)]
        minutes = [(each.seconds - self.began) / 60 for each in late]
        growth = slope(minutes, [each.shell_rss for each in late]) * (minutes[-1] - minutes[0])
        self.verdicts.expect(growth < MAX_GROWTH, f"the shell's memory grew by {growth:.1f} MB")
        self.verdicts.expect(not after.core_rss, f"{len(after.core_rss)} processes are left")
        for name in ("num_fds", "num_threads", "num_folders"):
            was, now = getattr(before, name), getattr(after, name)
            self.verdicts.expect(now <= was, f"{name} was {was} before and is {now} afterwards")
        return {
            "seconds": round(self.deadline - self.began),
            "seed": self.seed,
            "done": dict(sorted(self.counts.items())),
            "requests": dict(sorted(self.verdicts.outcomes.items())),
            "shell_mb": [round(late[0].shell_rss, 1), round(late[-1].shell_rss, 1)],
            "shell_growth_mb": round(growth, 2),
            "core_mb_max": round(max(core for each in late for core in each.core_rss), 1),
            "fds": [before.num_fds, max(each.num_fds for each in late), after.num_fds],
            "threads": [before.num_threads, max(each.num_threads for each in late), after.num_threads],
            "problems": self.verdicts.problems,
        }


def settled_footprint(before: Footprint) -> Footprint:
    """Taken once what is on its way out has left, or has had the time to."""
    deadline = time.monotonic() + SETTLING_TIME
    while True:
        gc.collect()
        after = take_footprint()
        settled = not after.core_rss and after.num_threads <= before.num_threads and after.num_fds <= before.num_fds
        if settled or time.monotonic() > deadline:
            return after
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.CRITICAL)  # each kill is an error in the log
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        from tiny_llama import build_tiny_llama

        os.environ["VLLM_RPC_BASE_PATH"] = folder  # other engines' socket folders are no concern of this one
        soak = Soak(str(build_tiny_llama(Path(folder))), options.minutes * 60, options.seed)
        before = take_footprint()
        asyncio.run(soak.run())
        report = soak.report(before, settled_footprint(before))
    print(json.dumps(report))
    sys.exit(bool(report["problems"]))


if __name__ == "__main__":
    main()
