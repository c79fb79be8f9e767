"""`corespan bench serve`: load on an OpenAI-compatible server, and what it answered how fast, in vLLM's terms."""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

METRICS = ("ttft", "tpot", "itl", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", choices=["openai", "openai-chat"], default="openai", help="completions or chats [%(default)s]")
    add("--base-url", default="http://localhost:8000", help="the server, without /v1 [%(default)s]")
    add("--model", required=True, metavar="NAME", help="the model as the server names it")
    add("--dataset-name", choices=["random", "custom"], default="random", help="where prompts come from [%(default)s]")
    add("--dataset-path", metavar="FILE", help='custom: a JSON object a line, with "prompt"')
    add("--random-input-len", type=int, default=1024, metavar="N", help="random: tokens of a prompt [%(default)s]")
    add("--random-output-len", type=int, default=128, metavar="N", help="tokens of an answer [%(default)s]")
    add("--num-prompts", type=int, default=1000, metavar="N", help="requests [%(default)s]")
    add("--request-rate", type=float, default=float("inf"), metavar="R", help="requests a second [all at once]")
    add("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: bursts; more: even [%(default)s]")
    add("--max-concurrency", type=int, metavar="N", help="requests in flight at a time [no limit]")
    add("--ignore-eos", action="store_true", help="answers go on to their whole length")
    add("--metric-percentiles", default="99", metavar="P,...", help="percentiles to tell [%(default)s]")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals [%(default)s]")
    add("--save-result", action="store_true", help="write the result as JSON")
    add("--result-filename", default="bench.json", metavar="FILE", help="where to [%(default)s]")


@dataclass
class Timing:
    """One answer; times in seconds. `error` says why there is none."""

    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    error: str | None = None


def run(options: argparse.Namespace) -> int:
    """Raises ValueError for options that make no sense, OSError for files that cannot be read or written."""
    if options.num_prompts < 1 or not options.request_rate > 0 or not options.burstiness > 0:
        raise ValueError("--num-prompts, --request-rate and --burstiness must be above 0")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {options.max_concurrency}")
    percentiles = [float(each) for each in options.metric_percentiles.split(",")]
    timings, duration = asyncio.run(_load(options))
    result = figures(timings, duration, percentiles)
    for name, value in result.items():
        print(f"{name:32} {value:.2f}" if isinstance(value, float) else f"{name:32} {value}")
    if errors := {timing.error for timing in timings if timing.error}:
        print("errors:", "; ".join(sorted(errors)[:3]))
    if options.save_result:
        Path(options.result_filename).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["completed"] else 1


def prompts_of(options: argparse.Namespace) -> list[Any]:
    """Texts, or token ids where completions are asked for at random."""
    source = random.Random(options.seed)
    if options.dataset_name == "custom":
        if options.dataset_path is None:
            raise ValueError("--dataset-name custom needs --dataset-path")
        lines = Path(options.dataset_path).read_text(encoding="utf-8").splitlines()
        known = [json.loads(line)["prompt"] for line in lines if line.strip()]
        return [known[number % len(known)] for number in range(options.num_prompts)]
    drawn = [[source.randrange(10, 250) for _ in range(options.random_input_len)] for _ in range(options.num_prompts)]
    return drawn if options.backend == "openai" else [" ".join(map(str, each)) for each in drawn]


async def _load(options: argparse.Namespace) -> tuple[list[Timing], float]:
    prompts, arrivals = prompts_of(options), random.Random(options.seed)
    slots = asyncio.Semaphore(options.max_concurrency or len(prompts))

    async def one(prompt: Any) -> Timing:
        async with slots:
            return await _ask(options, prompt)

    began, tasks = time.perf_counter(), []
    due = began
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt)))
        if options.request_rate != float("inf"):
            due += arrivals.gammavariate(options.burstiness, 1 / (options.request_rate * options.burstiness))
            await asyncio.sleep(max(due - time.perf_counter(), 0))
    timings = await asyncio.gather(*tasks)
    return timings, time.perf_counter() - began


async def _ask(options: argparse.Namespace, prompt: Any) -> Timing:
    chat = options.backend == "openai-chat"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body |= {"model": options.model, "max_tokens": options.random_output_len, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if options.ignore_eos:
        body["ignore_eos"] = True
    timing, began = Timing(), time.perf_counter()
    last = began
    try:
        async for event in _events(options.base_url, "/v1/chat/completions" if chat else "/v1/completions", body):
            if "error" in event:
                raise OSError(str(event["error"]))
            if usage := event.get("usage"):
                timing.num_input, timing.num_output = usage["prompt_tokens"], usage["completion_tokens"]
            if any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in event["choices"]):
                now = time.perf_counter()
                if timing.ttft:
                    timing.gaps.append(now - last)
                else:
                    timing.ttft = now - began
                last = now
        timing.latency = last - began
        if not timing.ttft:
            timing.error = "an answer without text"
    except (OSError, EOFError, ValueError) as error:
        timing.error = str(error) or type(error).__name__
    return timing


async def _events(base_url: str, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer. Raises OSError for a refusal."""
    url = urlsplit(base_url)
    secure = url.scheme == "https"
    reader, writer = await asyncio.open_connection(
        url.hostname, url.port or (443 if secure else 80), ssl=secure or None
    )
    content = json.dumps(body).encode()
    key = os.environ.get("OPENAI_API_KEY", "EMPTY")
    head = f"POST {url.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    try:
        writer.write(head.encode() + content)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if answer.split()[1] != b"200":
            raise OSError(f"{answer.split()[1].decode()}: {(await reader.read(300)).decode(errors='replace')}")
        rest = b""
        async for part in _parts(reader, b"transfer-encoding: chunked" in answer):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and b"[DONE]" not in line[:14]:
                    yield json.loads(line[5:])
    finally:
        writer.close()


async def _parts(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    while chunked and (size := int((await reader.readline()).split(b";")[0], 16)):
        yield (await reader.readexactly(size + 2))[:-2]
    while not chunked and (part := await reader.read(65536)):
        yield part


def figures(timings: Sequence[Timing], duration: float, percentiles: Sequence[float]) -> dict[str, Any]:
    """vLLM's result fields; times in ms. TPOT is the time behind the first token over the tokens behind it."""
    import numpy as np

    good = [timing for timing in timings if timing.error is None]
    num_input, num_output = sum(each.num_input for each in good), sum(each.num_output for each in good)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(timings) - len(good),
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }
    several = [each for each in good if each.num_output > 1]
    seconds = {
        "ttft": [each.ttft for each in good],
        "tpot": [(each.latency - each.ttft) / (each.num_output - 1) for each in several],
        "itl": [gap for each in good for gap in each.gaps],
        "e2el": [each.latency for each in good],
    }
    for name in METRICS:
        values = np.array(seconds[name] or [0.0]) * 1000
        result[f"mean_{name}_ms"] = float(values.mean())
        result[f"median_{name}_ms"] = float(np.median(values))
        result[f"std_{name}_ms"] = float(values.std())
        for percentile in percentiles:
            result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return result
