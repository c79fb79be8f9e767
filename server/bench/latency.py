"""Measures how long the engine takes for one batch of requests, again and again, without a server."""

import argparse
import random
import time
from typing import Any

from . import offline
from .datasets import HIGHEST_ID, LOWEST_ID

SUMMARY = "the engine on one batch, again and again"
PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input-len", type=int, default=32, metavar="N", help="tokens a prompt [%(default)s]")
    add("--output-len", type=int, default=128, metavar="N", help="tokens an answer [%(default)s]")
    add("--batch-size", type=int, default=8, metavar="N", help="requests a batch [%(default)s]")
    add("--num-iters-warmup", type=int, default=10, metavar="N", help="batches before it counts [%(default)s]")
    add("--num-iters", type=int, default=30, metavar="N", help="batches that count [%(default)s]")
    offline.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Raises ValueError for options that make no sense, OSError for a file that cannot be written."""
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    with offline.running_llm(options) as llm:
        seconds = _measure(llm, options)
    result = figures(seconds)
    print(f"Avg latency: {result['avg_latency']} seconds")
    for percentile, value in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {value} seconds")
    offline.save(options, result)
    return 0


def _measure(llm: Any, options: argparse.Namespace) -> list[float]:
    """Seconds of each batch. A batch differs from the one before it, so that no prompt is in the prefix cache."""
    source, params = random.Random(0), offline.params_of(options, options.output_len)
    seconds = []
    for number in range(options.num_iters_warmup + options.num_iters):
        prompts = [
            {"prompt_token_ids": [source.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(options.input_len)]}
            for _ in range(options.batch_size)
        ]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if number >= options.num_iters_warmup:
            seconds.append(time.perf_counter() - began)
    return seconds


def figures(seconds: list[float]) -> dict[str, Any]:
    """vLLM's result fields, in seconds."""
    import numpy as np

    percentiles = {str(each): float(np.percentile(seconds, each)) for each in PERCENTILES}
    return {"avg_latency": float(np.mean(seconds)), "latencies": seconds, "percentiles": percentiles}
