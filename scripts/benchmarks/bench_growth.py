"""How throughput grows, in process: with the batch, the context, the prompt, the waiting requests and the cores.

    batch    tokens out per second of decode steps, that many sequences of 64 tokens each
    context  the same, 8 sequences of about that many tokens each
    prompt   tokens in per second until the first token, one prompt of about that many tokens
    waiting  the same as batch, 256 sequences of 16 tokens running and that many requests waiting behind them
    cores    the same as batch, 64 sequences, on that many of the cores there are

Every figure comes from the median of its steps (of its prompts). Prints one JSON line a point, then a table in which
each point stands with its gain over the one before; a curve's knee is where the gain leaves what it was.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepped_engine import SteppedEngine
from subjects import load_pyplot, print_columns

MAX_MODEL_LEN, MAX_NUM_SEQS = 8192, 256
Point = tuple[int, float]  # where on the curve, tokens per second


class Growth:
    """One engine and how thoroughly to measure it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.quick = options.quick
        self.steps = 5 if self.quick else 30
        self.longest = MAX_MODEL_LEN // 8 if self.quick else MAX_MODEL_LEN
        limits = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN}
        self.engine = SteppedEngine(options.model, **limits | options.engine_args)

    def points(self, first: int, last: int, factor: int) -> list[int]:
        """`first`, times `factor` and so on to `last`; with --quick the first, a middle one and the last."""
        points = [first]
        while points[-1] * factor <= last:
            points.append(points[-1] * factor)
        return [points[0], points[len(points) // 2], points[-1]] if self.quick else points

    def batch(self) -> Iterator[Point]:
        for count in self.points(1, 256, 2):
            yield count, self._decode_rate(count, 64)

    def context(self) -> Iterator[Point]:
        for length in self.points(128, self.longest, 2):
            yield length, self._decode_rate(8, length * 15 // 16)

    def prompt(self) -> Iterator[Point]:
        for about in self.points(32, self.longest, 4):
            length = about * 15 // 16
            seconds = []
            for _ in range(2 if self.quick else 5):
                began = time.perf_counter()
                self.engine.fill(1, length, 0)
                seconds.append(time.perf_counter() - began)
                self.engine.clear()
            yield about, length / statistics.median(seconds)

    def waiting(self) -> Iterator[Point]:
        for waiting in (0, *self.points(1, 10_000, 10)):
            yield waiting, self._decode_rate(MAX_NUM_SEQS, 16, waiting)

    def cores(self) -> Iterator[Point]:
        import torch

        available = torch.get_num_threads()
        for threads in range(1, available + 1):
            torch.set_num_threads(threads)
            yield threads, self._decode_rate(64, 64)

    def _decode_rate(self, count: int, prompt_length: int, waiting: int = 0) -> float:
        self.engine.fill(count, prompt_length, self.steps + 1)
        self.engine.add(waiting, 16, 1)
        seconds = self.engine.decode_seconds(self.steps)
        self.engine.clear()
        return count / seconds


CURVES: dict[str, Callable[[Growth], Iterator[Point]]] = {
    "batch": Growth.batch,
    "context": Growth.context,
    "prompt": Growth.prompt,
    "waiting": Growth.waiting,
    "cores": Growth.cores,
}


def main() -> None:
    options = parse_options()
    growth = Growth(options)
    curves: dict[str, list[Point]] = {}
    for name in options.curves:
        curves[name] = []
        for at, rate in CURVES[name](growth):
            curves[name].append((at, rate))
            print(f"{name} {at:,}: {rate:,.1f} tok/s", file=sys.stderr)
            print(json.dumps({"curve": name, "at": at, "tok_s": round(rate, 1)}), flush=True)
    print_table(curves)
    if options.plot:
        plot(curves, options.plot)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="[%(default)s]")
    add("--curves", nargs="+", choices=list(CURVES), default=list(CURVES), metavar="NAME", help="[all]")
    add("--quick", action="store_true", help="three points a curve, a few steps each, contexts to 1,024")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help='such as {"quantization": "int8"}')
    add("--plot", type=Path, metavar="FILE.png", help="draw the curves; needs matplotlib")
    return parser.parse_args()


def print_table(curves: dict[str, list[Point]]) -> None:
    rows = [["curve", "at", "tok/s", "over the one before"]]
    for name, points in curves.items():
        before: float | None = None
        for at, rate in points:
            rows.append([name, f"{at:,}", f"{rate:,.1f}", "" if before is None else f"{rate / before:.2f}x"])
            before = rate
    print_columns(rows)


def plot(curves: dict[str, list[Point]], path: Path) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(curves), figsize=(3.6 * len(curves), 3.2), squeeze=False)
    for axis, (name, points) in zip(axes[0], curves.items(), strict=True):
        axis.plot([at for at, _ in points], [rate for _, rate in points], marker="o")
        axis.set_xscale("symlog" if points[0][0] == 0 else "log", base=2 if points[-1][0] < 10_000 else 10)
        axis.set_ylim(bottom=0)
        axis.set_title(name)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
