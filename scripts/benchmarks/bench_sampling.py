"""What sampling options cost: one workload under several options, as ratios to the same engine's greedy runs.

Every engine stays loaded in a process of its own. Each run with options has a greedy run beside it, before it in one
round and behind it in the next, and the median of those pairs' ratios is reported, so that a machine whose speed drifts
does not matter. Prints JSON lines and a table. All of it takes a quarter of an hour on two cores.

`--masks` needs no model and a few seconds: what masks of allowed tokens (of grammars, allowed_token_ids, bad_words and
min_tokens) cost the draw.
"""

import argparse
import contextlib
import json
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from subjects import CORESPAN_KINDS, Subject, checkout, corespan_command, print_columns
from workloads import WORKLOADS

from corespan.core.kernels.sampling import Allowed, DrawParams
from corespan.core.sampling.draw import draw

VARIANTS: dict[str, dict[str, object]] = {
    "greedy": {},
    "logprobs=5": {"logprobs": 5},
    "temperature": {"temperature": 0.8},
    "temperature+top_k": {"temperature": 0.8, "top_k": 50},
    "temperature+top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k+top_p+min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "seeded": {"temperature": 0.8, "seed": 1},
}


@dataclass
class Series:
    """Tokens per second of one variant's runs, and of the greedy run beside each."""

    rates: list[float] = field(default_factory=list)
    greedy_rates: list[float] = field(default_factory=list)

    def ratio(self) -> float:
        return median_ratio(self.rates, self.greedy_rates)


def main() -> None:
    options = parse_options()
    if options.masks:
        return print_masks()
    with contextlib.ExitStack() as stack:
        revisions: dict[str, dict[str, str]] = {"": {}}
        if options.compare:
            revisions[f"@{options.compare}"] = {"PYTHONPATH": stack.enter_context(checkout(options.compare))}
        subjects = []
        for kind in options.engines:
            for suffix, environment in revisions.items():
                command = corespan_command(options.model, kind, options.engine_args)
                subjects.append(Subject(kind + suffix, command, environment))
                stack.callback(subjects[-1].close)
        series = {(subject.name, variant): Series() for subject in subjects for variant in options.variants}
        for number in range(options.repeat):
            for variant in options.variants:
                for subject in subjects:
                    measure_pair(subject, variant, options.workload, number, series[subject.name, variant])
    for (engine, variant), each in series.items():
        print(json.dumps(summary(engine, variant, each, series.get((f"{engine}@{options.compare}", variant)))))
    print_table([subject.name for subject in subjects], options, series)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_sampling", description=__doc__)
    add = parser.add_argument
    kinds, names = list(CORESPAN_KINDS), list(VARIANTS)
    add("--model", default="smollm2-135m", help="[%(default)s]")
    add("--engines", nargs="+", choices=kinds, default=["inproc", "multiprocess"], metavar="NAME", help=f"{kinds}")
    add("--engine-args", default="{}", metavar="JSON", help="further EngineArgs fields")
    add("--compare", metavar="REV", help="measure this git revision beside the working tree")
    add("--variants", nargs="+", choices=names, default=names, metavar="NAME", help=f"{names}")
    add("--workload", choices=list(WORKLOADS), default="batch", metavar="NAME", help="[%(default)s]")
    add("--repeat", type=int, default=3, metavar="N", help="pairs of runs for each variant [%(default)s]")
    add("--masks", action="store_true", help="time masked and unmasked draws of 64 rows over a vocabulary of 151,936")
    return parser.parse_args()


def print_masks(num_rows: int = 64, vocab_size: int = 151_936) -> None:
    """Milliseconds of a step's draw, the medians of 15 that alternate."""
    generator = np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))
    words = generator.integers(0, 2**32, (num_rows, -(-vocab_size // 32)), dtype=np.uint32)
    masks = {"unmasked": None, "masked": Allowed(np.arange(num_rows), words)}
    for temperature in (0.0, 0.8):
        off, on = np.zeros(num_rows), np.ones(num_rows)
        params = DrawParams(on * temperature, off, np.zeros(num_rows, dtype=np.int64), on, on / 2)
        times: dict[str, list[float]] = {name: [] for name in masks}
        for _ in range(15):
            for name, allowed in masks.items():
                began = time.perf_counter()
                draw(logits, params, None, allowed)
                times[name].append((time.perf_counter() - began) * 1e3)
        medians = {f"{name}_ms": round(statistics.median(each), 2) for name, each in times.items()}
        print(json.dumps({"rows": num_rows, "vocab": vocab_size, "temperature": temperature, **medians}))


def measure_pair(subject: Subject, variant: str, workload: str, number: int, series: Series) -> None:
    """One run of the variant and one greedy run; which comes first alternates with `number`."""
    runs = [(series.greedy_rates, {}), (series.rates, VARIANTS[variant])]
    for rates, sampling in runs if number % 2 == 0 else reversed(runs):
        rates.append(subject.measure(workload, **sampling))


def median_ratio(rates: list[float], others: list[float]) -> float:
    return statistics.median(rate / other for rate, other in zip(rates, others, strict=True))


def summary(engine: str, variant: str, series: Series, before: Series | None) -> dict[str, object]:
    ratios = [rate / other for rate, other in zip(series.rates, series.greedy_rates, strict=True)]
    report: dict[str, object] = {
        "engine": engine,
        "variant": variant,
        "tok_s": round(statistics.median(series.rates), 1),
        "ratio_to_greedy": round(series.ratio(), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    if before is not None:
        report["ratio_to_revision"] = round(median_ratio(series.rates, before.rates), 3)
    return report


def print_table(engines: list[str], options: argparse.Namespace, series: dict[tuple[str, str], Series]) -> None:
    """Rows are variants: each engine's ratio to its greedy runs and, where compared, to the other revision's rate."""
    pairs = [(kind, f"{kind}@{options.compare}") for kind in options.engines if options.compare]
    rows = [["variant", *engines, *(f"{kind} / {other}" for kind, other in pairs)]]
    for variant in options.variants:
        ratios = [series[engine, variant].ratio() for engine in engines]
        ratios += [median_ratio(series[kind, variant].rates, series[other, variant].rates) for kind, other in pairs]
        rows.append([variant, *(f"{ratio:.3f}" for ratio in ratios)])
    if pairs:
        comparisons = [f"{greedy_ratio(series, *pair):.3f}" for pair in pairs]
        rows.append(["all greedy runs", *[""] * len(engines), *comparisons])
    print_columns(rows)


def greedy_ratio(series: dict[tuple[str, str], Series], engine: str, other: str) -> float:
    """Out of the greedy runs beside all variants, which makes many pairs."""
    rates: dict[str, list[float]] = {engine: [], other: []}
    for (name, _), each in series.items():
        if name in rates:
            rates[name] += each.greedy_rates
    return median_ratio(rates[engine], rates[other])


if __name__ == "__main__":
    main()
