"""A mix of everything on `corespan serve` with a tiny model, for a while: streams and whole answers of every API,
clients that leave at any moment, bodies that make no sense, and cores that are killed and restarted.

Answers are greedy, and each prompt's is known from its first whole answer, so that one that is lost, doubled or wrong
shows. At the end nothing may be left: no request, no block in use, no descriptor, and memory must not have grown; the
server ends in order. Prints one JSON line; the exit status is 0 when all of it holds.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from footprint import MEGABYTE, slope

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from tiny_llama import build_tiny_llama  # noqa: E402

NUM_CLIENTS = 24
NUM_PROMPTS = 40
KILL_INTERVAL = (8.0, 20.0)
WARM_UP = 0.25  # of the time, in which memory may still grow
MAX_GROWTH = 24.0  # MB of the server's memory afterwards
MAX_MORE_DESCRIPTORS = 8
PATIENCE_SECONDS = 120.0  # for one answer, restarts of the core included
NONSENSE: list[Any] = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    {"prompt": None},
    {"prompt": [-1]},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": "many"},
    {"prompt": "x " * 5000},
    {"prompt": "x", "structured_outputs": {"regex": "("}},
    {"messages": "no", "prompt": {}},
    {"prompt": "x", "model": "another"},
]
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class SoakServe:
    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        self.seconds = seconds
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.known: dict[str, str] = {}
        self.memory: list[tuple[float, float]] = []
        socket = folder / "socket"
        options = [
            "--uds",
            str(socket),
            "--served-model-name",
            "tiny",
            "--max-model-len",
            "256",
            "--max-num-seqs",
            "16",
        ]
        options += ["--num-gpu-blocks-override", "129", "--engine-restart", "10000", "--disable-uvicorn-access-log"]
        command = [sys.executable, "-m", "corespan.server.cli", "serve", str(build_tiny_llama(folder / "model"))]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen([*command, *options], stderr=self.log, stdout=self.log)
        self.server = psutil.Process(self.process.pid)
        self.http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=None)),
            base_url="http://soak",
            timeout=PATIENCE_SECONDS,
        )

    def fail(self, what: str) -> None:
        self.counts["failures"] += 1
        if len(self.failures) < 20:
            self.failures.append(what[:300])

    def over(self) -> bool:
        return time.monotonic() > self.deadline

    async def run(self) -> None:
        while not await self._is_ready():
            if self.process.poll() is not None:
                raise SystemExit(Path(self.log.name).read_text())
            await asyncio.sleep(0.1)
        self.num_fds = self.server.num_fds()
        self.deadline = time.monotonic() + self.seconds
        background = [asyncio.create_task(part) for part in (self.kill(), self.watch())]
        await asyncio.gather(*(self.client(number) for number in range(NUM_CLIENTS)))
        await asyncio.gather(*background)
        await self.check_idle()
        await self.http.aclose()

    async def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self.http.get("/health")).status_code == 200
        return False

    async def client(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        acts = [self.stream, self.whole, self.leave, self.nonsense, self.other_apis]
        while not self.over():
            act = rng.choices(acts, weights=[5, 3, 3, 1, 1])[0]
            self.counts[act.__name__] += 1
            try:
                await act(rng)
            except httpx.HTTPError as error:
                self.fail(f"{act.__name__}: {type(error).__name__}: {error}")

    def _body(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        prompt = f"Once upon a time number {rng.randrange(NUM_PROMPTS)}"
        return {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}

    def _judge(self, prompt: str, text: str) -> None:
        if self.known.setdefault(prompt, text) != text:
            self.fail(f"{prompt!r} was answered {text!r}, before {self.known[prompt]!r}")

    async def whole(self, rng: random.Random) -> None:
        body = self._body(rng)
        answer = await self.http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            self.fail(f"whole: {answer.status_code} {answer.text}")
            return
        self._judge(body["prompt"], answer.json()["choices"][0]["text"])

    async def stream(self, rng: random.Random) -> None:
        body = self._body(rng, stream=True)
        text, lines = "", []
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.fail(f"stream: {line}")
                        return
                    text += event["choices"][0]["text"]
                lines.append(line)
        if "data: [DONE]" not in lines[-2:]:
            self.fail(f"a stream ended with {lines[-2:]}")
            return
        self._judge(body["prompt"], text)

    async def leave(self, rng: random.Random) -> None:
        """At any moment: before the head, or after some events."""
        body = self._body(rng, stream=rng.random() < 0.7, max_tokens=200, n=rng.choice([1, 1, 3]), temperature=1)
        num_lines = rng.randrange(12)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0, 1.0)):
                async with self.http.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        num_lines -= 1
                        if num_lines < 0:
                            break

    async def nonsense(self, rng: random.Random) -> None:
        body = rng.choice(NONSENSE)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
        if path == "/tokenize" and isinstance(body, dict) and isinstance(body.get("prompt"), str):
            path = "/v1/completions"
        answer = await self.http.post(path, content=content, headers={"Content-Type": "application/json"})
        if not 400 <= answer.status_code < 500:
            self.fail(f"nonsense: {path} {content[:100]!r}: {answer.status_code}")

    async def other_apis(self, rng: random.Random) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        path, body = rng.choice(
            [
                ("/v1/chat/completions", {"messages": messages, "max_tokens": 20}),
                ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 20}),
                ("/v1/responses", {"input": "Hello", "max_output_tokens": 20}),
            ]
        )
        answer = await self.http.post(path, json={**body, "stream": rng.random() < 0.5})
        if answer.status_code != 200 or '"type":"error"' in answer.text:
            self.fail(f"{path}: {answer.status_code} {answer.text[-300:]}")

    async def kill(self) -> None:
        """A core, every now and then. Its requests go on in the next."""
        rng = random.Random(f"{self.seed}/kill")
        while not self.over():
            await asyncio.sleep(min(rng.uniform(*KILL_INTERVAL), max(self.deadline - time.monotonic(), 0)))
            if cores := self.server.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    max(cores, key=lambda core: core.memory_info().rss).kill()
                    self.counts["kills"] += 1

    async def watch(self) -> None:
        began = time.monotonic()
        while not self.over():
            await asyncio.sleep(1.0)
            now = time.monotonic() - began
            if now > self.seconds * WARM_UP:
                self.memory.append((now, self.server.memory_info().rss / MEGABYTE))

    async def check_idle(self) -> None:
        """Returns when nothing is left in the server; what is after a while is a failure."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            metrics = (await self.http.get("/metrics")).text
            left = {name: value for name in GAUGES if (value := _value(metrics, name)) != 0.0}
            load = (await self.http.get("/load")).json()["server_load"]
            connections = len(self.server.net_connections(kind="unix"))
            if not left and load == 0:
                break
            if time.monotonic() > deadline:
                self.fail(f"left at the end: {left}, {load} requests, {connections} sockets")
                break
            await asyncio.sleep(0.2)

    def end(self) -> int:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (num_fds := self.server.num_fds()) > self.num_fds + MAX_MORE_DESCRIPTORS:
            if time.monotonic() > deadline:  # the server notices a little later that the clients have hung up
                break
            time.sleep(0.1)
        if num_fds > self.num_fds + MAX_MORE_DESCRIPTORS:
            self.fail(f"the server has {num_fds} descriptors open, {self.num_fds} at its start")
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(PATIENCE_SECONDS)
        if status != 0:
            self.fail(f"the server ended with status {status}: {Path(self.log.name).read_text()[-2000:]}")
        return num_fds


def _value(metrics: str, name: str) -> float | None:
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE)
    return None if found is None else float(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak_serve", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="how long [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn [%(default)s]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = SoakServe(Path(folder), options.seconds, options.seed)
        try:
            asyncio.run(soak.run())
            num_fds = soak.end()
        finally:
            if soak.process.poll() is None:
                soak.process.kill()
    seconds, memory = zip(*soak.memory, strict=True) if len(soak.memory) > 1 else ((0.0, 1.0), (0.0, 0.0))
    growth = slope(list(seconds), list(memory)) * (seconds[-1] - seconds[0])
    if growth > MAX_GROWTH:
        soak.fail(f"the server's memory grew by {growth:.0f} MB")
    report = {"seconds": options.seconds, "counts": dict(soak.counts), "growth_mb": round(growth, 1), "fds": num_fds}
    print(json.dumps(report | {"failures": soak.failures}))
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
