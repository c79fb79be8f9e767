"""Short requests through AsyncLLM on a tiny random bfloat16 model, a quarter cancelled, and both processes' memory.

Prints one JSON line; the exit status says whether memory stayed flat and all blocks came back.

The slopes are those of the second half, when caches and allocators have reached their size.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from footprint import Footprint, slope, take_footprint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

VOCAB_SIZE = 512
SAMPLES = 100
LIMIT = 0.5  # MB more per 1,000 requests


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, metavar="N", help="[%(default)s]")
    parser.add_argument("--concurrency", type=int, default=128, metavar="N", help="open streams [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="memory-corespan-") as folder:
        from tiny_llama import build_tiny_llama

        report = asyncio.run(run(str(build_tiny_llama(Path(folder), dtype="bfloat16")), options))
    print(json.dumps(report))
    flat = max(report["shell_mb_per_1000_requests"], report["core_mb_per_1000_requests"]) < LIMIT
    sys.exit(not (flat and report["all_blocks_free"]))


async def run(model: str, options: argparse.Namespace) -> dict[str, Any]:
    from corespan import AsyncEngineArgs, AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=model, max_model_len=256, max_num_seqs=64, num_gpu_blocks_override=1025)
    )
    numbers = iter(range(options.requests))
    footprints: list[tuple[int, Footprint]] = []

    async def worker() -> None:
        for number in numbers:
            if number % max(options.requests // SAMPLES, 1) == 0:
                footprints.append((number, take_footprint()))
            await request(engine, number, random.Random(f"{options.seed}/{number}"))

    try:
        await asyncio.gather(*(worker() for _ in range(options.concurrency)))
        running, waiting = await engine.engine_core.get_request_counts()
        free = running + waiting == 0 and await engine.engine_core.reset_prefix_cache()
    finally:
        engine.shutdown()
    late = footprints[len(footprints) // 2 :]
    thousands = [number / 1000 for number, _ in late]
    return {
        "requests": options.requests,
        "shell_mb_per_1000_requests": round(slope(thousands, [each.shell_rss for _, each in late]), 4),
        "core_mb_per_1000_requests": round(slope(thousands, [each.core_rss[0] for _, each in late]), 4),
        "shell_mb": [round(each.shell_rss, 1) for _, each in footprints[:: SAMPLES // 10]],
        "core_mb": [round(each.core_rss[0], 1) for _, each in footprints[:: SAMPLES // 10]],
        "all_blocks_free": bool(free),
    }


async def request(engine: Any, number: int, rng: random.Random) -> None:
    """Every fourth one is cancelled: before it is scheduled, or when some tokens have come."""
    from corespan import RequestOutputKind, SamplingParams

    prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(4, 60))]
    params = SamplingParams(
        max_tokens=rng.randint(1, 12),
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        logprobs=2 if number % 10 == 0 else None,
        n=2 if number % 25 == 0 else 1,
    )
    patience = rng.randint(0, 6) if number % 4 == 0 else None
    stream = engine.generate({"prompt_token_ids": prompt}, params, str(number))
    if patience == 0:
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    try:
        count = 0
        async for _ in stream:
            count += 1
            if count == patience:
                break
    finally:
        await stream.aclose()


if __name__ == "__main__":
    main()
