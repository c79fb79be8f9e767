"""Measures an OpenAI-compatible server under load: how much it answers, and how fast."""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import datasets
from .client import Target, Timing
from .datasets import Sample
from .plot import shares_svg
from .results import METRICS, details, distributions, figures

SUMMARY = "a server that answers streams"
_CHAT = "openai-chat"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the server").add_argument
    add("--backend", choices=["openai", "vllm", _CHAT], default="openai", help=f"{_CHAT}: chats [completions]")
    add("--base-url", metavar="URL", help="the server, without /v1 [of --host and --port]")
    add("--host", default="localhost", help="where the server is [%(default)s]")
    add("--port", type=int, default=8000, help="its port [%(default)s]")
    add("--endpoint", metavar="PATH", help="the route [the backend's]")
    add("--model", metavar="NAME", help="the model as the server names it [its first]")
    add("--header", nargs="*", default=[], metavar="NAME=VALUE", help="headers of every request")
    add("--ready-check-timeout-sec", type=float, default=0.0, metavar="S", help="wait so long for the server")
    datasets.add_arguments(parser, input_len=1024, num_prompts=1000)
    add = parser.add_argument_group("requests").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature [%(default)s]")
    add("--top-p", type=float, metavar="P", help="nucleus sampling: share of the probability kept [the server's]")
    add("--top-k", type=int, metavar="K", help="candidates for each token [the server's]")
    add("--ignore-eos", action="store_true", help="answers go on to their whole length")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields of every request")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrivals [%(default)s]")
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", type=float, default=float("inf"), metavar="R", help="requests a second [all at once]")
    add("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: bursts; more: even [%(default)s]")
    add("--ramp-up-strategy", choices=["linear", "exponential"], help="let the rate grow over the run")
    add("--ramp-up-start-rps", type=float, metavar="R", help="requests a second at its beginning")
    add("--ramp-up-end-rps", type=float, metavar="R", help="requests a second at its end")
    add("--max-concurrency", type=int, metavar="N", help="requests in flight at a time [no limit]")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests before it counts [%(default)s]")
    add("--profile", action="store_true", help="have the server write a profile (it needs --enable-admin)")
    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", default=",".join(METRICS), metavar="M,...", help="what is told [%(default)s]")
    add("--metric-percentiles", default="99", metavar="P,...", help="and which percentiles of it [%(default)s]")
    add("--goodput", nargs="*", default=[], metavar="M:MS", help="limits on ttft, tpot or e2el, e.g. ttft:200")
    add("--label", metavar="TEXT", help="a name for the run, told in the result")
    add("--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="more to tell in the result")
    add("--save-result", action="store_true", help="write the result as JSON")
    add("--save-detailed", action="store_true", help="with every request's own figures")
    add("--append-result", action="store_true", help="behind those in the file, a line each")
    add("--result-dir", default=".", metavar="FOLDER", help="folder of the result [%(default)s]")
    add("--result-filename", default="bench.json", metavar="FILE", help="file of the result [%(default)s]")
    add("--plot", metavar="FILE", help="draw the distributions as SVG")


def run(options: argparse.Namespace) -> int:
    """Raises ValueError for options that make no sense, OSError for files that cannot be read or written."""
    _check(options)
    percentiles = [float(each) for each in options.metric_percentiles.split(",")]
    metrics = _known_metrics(options.percentile_metrics.split(","))
    goodput = {name: float(limit) for name, limit in _pairs(options.goodput, ":", "--goodput").items()}
    _known_metrics(goodput)
    timings, duration, model = asyncio.run(Load(options).run())
    result = _described(options, model) | figures(timings, duration, percentiles, metrics, goodput)
    for name, value in result.items():
        print(f"{name:32} {value:.2f}" if isinstance(value, float) else f"{name:32} {value}")
    if errors := {timing.error for timing in timings if timing.error}:
        print("errors:", "; ".join(sorted(errors)[:3]))
    if options.save_result or options.save_detailed or options.append_result:
        _save(options, result | details(timings) if options.save_detailed else result)
    if options.plot:
        good = [timing for timing in timings if timing.error is None]
        title = f"{model}: {result['output_throughput']:.0f} tokens/s, share of requests by latency"
        Path(options.plot).write_text(shares_svg(title, distributions(good)), encoding="utf-8")
    return 0 if result["completed"] else 1


def _check(options: argparse.Namespace) -> None:
    if not options.request_rate > 0 or not options.burstiness > 0:
        raise ValueError("--request-rate and --burstiness must be above 0")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {options.max_concurrency}")
    ramp = (options.ramp_up_start_rps, options.ramp_up_end_rps)
    if options.ramp_up_strategy is not None and not all(rate is not None and rate > 0 for rate in ramp):
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps above 0")


def _known_metrics(names: Sequence[str] | dict[str, float]) -> list[str]:
    if unknown := set(names) - set(METRICS):
        raise ValueError(f"no such metric: {', '.join(sorted(unknown))}; there are {', '.join(METRICS)}")
    return list(names)


def _pairs(given: Sequence[str], separator: str, option: str) -> dict[str, str]:
    pairs = {}
    for each in given:
        name, found, value = each.partition(separator)
        if not found:
            raise ValueError(f"{option} takes NAME{separator}VALUE, got {each!r}")
        pairs[name] = value
    return pairs


class Load:
    """One run: its requests, when they are sent, what came back."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.chat = options.backend == _CHAT
        self.path = options.endpoint or ("/v1/chat/completions" if self.chat else "/v1/completions")
        key = os.environ.get("OPENAI_API_KEY", "EMPTY")
        headers = {"Authorization": f"Bearer {key}"} | _pairs(options.header, "=", "--header")
        self.target = Target(options.base_url or f"http://{options.host}:{options.port}", headers)
        self.samples = datasets.samples_of(options, options.seed)

    async def run(self) -> tuple[list[Timing], float, str]:
        """The answers' timings, the seconds of the whole run, the model's name. Raises OSError without a server."""
        options = self.options
        await self._wait_ready(options.ready_check_timeout_sec)
        model = options.model or await self._first_model()
        for _ in range(options.num_warmups):
            await self._ask(model, self.samples[0])
        if options.profile:
            await self.target.request("POST", "/start_profile")
        slots = asyncio.Semaphore(options.max_concurrency or len(self.samples))

        async def one(sample: Sample) -> Timing:
            async with slots:
                return await self._ask(model, sample)

        began, tasks = time.perf_counter(), []
        for sample, due in zip(self.samples, self._arrivals(), strict=True):
            if (wait := began + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(sample)))
        timings = await asyncio.gather(*tasks)
        duration = time.perf_counter() - began
        if options.profile:
            await self.target.request("POST", "/stop_profile")
        return timings, duration, model

    def _arrivals(self) -> Iterator[float]:
        """Seconds from the beginning at which each request is sent."""
        source, due = random.Random(self.options.seed), 0.0
        for number in range(len(self.samples)):
            yield due
            rate = self._rate_at(number / max(len(self.samples) - 1, 1))
            if rate != float("inf"):
                due += source.gammavariate(self.options.burstiness, 1 / (rate * self.options.burstiness))

    def _rate_at(self, progress: float) -> float:
        options = self.options
        start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
        if options.ramp_up_strategy == "linear":
            return float(start + (end - start) * progress)
        if options.ramp_up_strategy == "exponential":
            return float(start * (end / start) ** progress)
        return float(options.request_rate)

    async def _ask(self, model: str, sample: Sample) -> Timing:
        prompt, options = sample.prompt, self.options
        body: dict[str, Any] = {"prompt": prompt}
        if self.chat:
            text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
            body = {"messages": [{"role": "user", "content": text}]}
        body |= {"model": model, "max_tokens": sample.output_len, "temperature": options.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        given = {"top_p": options.top_p, "top_k": options.top_k, "ignore_eos": options.ignore_eos or None}
        body |= {name: value for name, value in given.items() if value is not None}
        return await self.target.ask(self.path, body | options.extra_body)

    async def _wait_ready(self, seconds: float) -> None:
        """Raises OSError where the server is not ready by then."""
        deadline = time.perf_counter() + seconds
        while seconds:
            try:
                status, _ = await self.target.request("GET", "/health")
                if status == 200:
                    return
                reason = f"it answers {status}"
            except (OSError, EOFError) as error:
                reason = str(error)
            if time.perf_counter() > deadline:
                raise OSError(f"the server is not ready after {seconds:g} s: {reason}")
            await asyncio.sleep(0.2)

    async def _first_model(self) -> str:
        status, body = await self.target.request("GET", "/v1/models")
        listing = json.loads(body).get("data") if status == 200 else None
        if not listing:
            raise OSError(f"/v1/models answers {status} and names no model; give --model")
        return str(listing[0]["id"])


def _described(options: argparse.Namespace, model: str) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "num_prompts": options.num_prompts,
        **_pairs(options.metadata, "=", "--metadata"),
        "request_rate": options.request_rate if options.request_rate != float("inf") else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def _save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    path = Path(options.result_dir) / options.result_filename
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.append_result:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    else:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
