"""What a run under load came to, in vLLM's result fields."""

from collections.abc import Mapping, Sequence
from typing import Any

from .client import Timing

METRICS = ("ttft", "tpot", "itl", "e2el")


def figures(
    timings: Sequence[Timing],
    duration: float,
    percentiles: Sequence[float],
    metrics: Sequence[str] = METRICS,
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Times in ms. TPOT is the time behind the first token over the tokens behind it.

    `goodput`: limits in ms on ttft, tpot or e2el; "request_goodput" is the rate of the requests that keep them all.
    """
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
    if goodput:
        keeping = [each for each in good if all(_of(each, name) * 1000 <= limit for name, limit in goodput.items())]
        result["request_goodput"] = len(keeping) / duration
    for name, seconds in distributions(good).items():
        if name not in metrics:
            continue
        values = np.array(seconds or [0.0]) * 1000
        result[f"mean_{name}_ms"] = float(values.mean())
        result[f"median_{name}_ms"] = float(np.median(values))
        result[f"std_{name}_ms"] = float(values.std())
        for percentile in percentiles:
            result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return result


def distributions(good: Sequence[Timing]) -> dict[str, list[float]]:
    """Seconds, by metric; one value a request, of the gaps between tokens all."""
    several = [each for each in good if each.num_output > 1]
    return {
        "ttft": [_of(each, "ttft") for each in good],
        "tpot": [_of(each, "tpot") for each in several],
        "itl": [gap for each in good for gap in each.gaps],
        "e2el": [_of(each, "e2el") for each in good],
    }


def details(timings: Sequence[Timing]) -> dict[str, Any]:
    """Every request's own figures, in the order of the requests; seconds."""
    return {
        "input_lens": [each.num_input for each in timings],
        "output_lens": [each.num_output for each in timings],
        "ttfts": [each.ttft for each in timings],
        "itls": [each.gaps for each in timings],
        "generated_texts": [each.text for each in timings],
        "errors": [each.error or "" for each in timings],
    }


def _of(timing: Timing, metric: str) -> float:
    if metric == "ttft":
        return timing.ttft
    if metric == "tpot":
        return (timing.latency - timing.ttft) / max(timing.num_output - 1, 1)
    return timing.latency
