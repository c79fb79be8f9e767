"""The cost of the bridge between shell and core, on a tiny random model and a real one: JSON lines and tables.

Every engine stays loaded in a process of its own. All engines take each measurement in turn, --repeat times: times are
minima over the rounds, since other work on the machine only ever adds to them, and throughputs are medians. Quote the
ratios to `inproc` and `multiprocess` out of one sitting, never figures out of two.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from subjects import BENCHMARKS, CORESPAN_KINDS, LineProcess

sys.path.insert(0, str(BENCHMARKS.parents[1] / "tests" / "support"))

MODELS = ["tiny", "smollm2-135m"]
LOWER_IS_BETTER = ("us", "ms", "bytes")  # units, which end a figure's name


class BridgeSubject(LineProcess):
    """One engine, asked for measurements of its bridge; `rounds` has what it answered, by figure."""

    def __init__(self, kind: str, model: str, engine_args: str, threads: str | None) -> None:
        command = [sys.executable, str(BENCHMARKS / "bridge_subject.py"), kind, model, engine_args]
        super().__init__(kind, command, {"OMP_NUM_THREADS": threads} if threads else {})
        self.rounds: dict[str, list[float]] = {}

    def measure(self, what: str, count: int) -> None:
        for name, figure in self.ask(f"{what} {count}").items():
            self.rounds.setdefault(name, []).append(figure)

    def figures(self) -> dict[str, float]:
        return {name: round(_best(name)(rounds), 3) for name, rounds in self.rounds.items()}


def _best(name: str) -> Callable[[list[float]], float]:
    return min if name.endswith(LOWER_IS_BETTER) else statistics.median


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="corespan-bench-") as folder:
        models = {}
        if "tiny" in options.models:
            models["tiny"] = build_tiny_model(folder)
        models |= {name: name for name in options.models if name != "tiny"}
        for name, model in models.items():
            subjects = measure_all(options, name, model)
            for subject in subjects:
                print(json.dumps({"model": name, "engine": subject.name} | subject.figures()), flush=True)
            print_table([[name, *(subject.name for subject in subjects)], *figure_rows(subjects)])
            print_table([["of the same rounds", *(subject.name for subject in subjects)], *comparisons(subjects)])


def build_tiny_model(folder: str) -> str:
    """Small enough that hardly anything but the bridge and the shell takes time."""
    from tiny_llama import build_tiny_llama
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return str(build_tiny_llama(Path(folder)))


def measure_all(options: argparse.Namespace, name: str, model: str) -> list[BridgeSubject]:
    """All engines on one model, shut down again."""
    with contextlib.ExitStack() as stack:
        subjects = []
        for kind in options.engines:
            threads = "1" if name == "tiny" else os.environ.get("OMP_NUM_THREADS")
            subjects.append(BridgeSubject(kind, model, options.engine_args, threads))
            stack.callback(subjects[-1].close)
        for _ in range(options.repeat):
            for what, count in (
                ("round_trip", options.calls),
                ("first_token", max(options.calls // 10, 2)),
                *(("streams", count) for count in options.streams),
                ("wire", 64),
            ):
                for subject in subjects:
                    subject.measure(what, count)
    return subjects


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_bridge", description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=MODELS, metavar="NAME", help=f"tiny: random weights [{' '.join(MODELS)}]")
    add(
        "--engines",
        nargs="+",
        choices=CORESPAN_KINDS,
        default=list(CORESPAN_KINDS),
        metavar="NAME",
        help=f"{', '.join(CORESPAN_KINDS)} [all]",
    )
    add("--engine-args", default="{}", metavar="JSON", help="further EngineArgs fields")
    add("--streams", nargs="+", type=int, default=[1, 64, 512], metavar="N", help="requests at once [1 64 512]")
    add("--calls", type=int, default=1000, metavar="N", help="empty calls; first tokens: a tenth [%(default)s]")
    add("--repeat", type=int, default=3, metavar="N", help="rounds [%(default)s]")
    return parser.parse_args()


def figure_rows(subjects: list[BridgeSubject]) -> list[list[str]]:
    names = list(dict.fromkeys(name for subject in subjects for name in subject.rounds))
    return [[name, *(f"{subject.figures().get(name, float('nan')):,.1f}" for subject in subjects)] for name in names]


def comparisons(subjects: list[BridgeSubject]) -> list[list[str]]:
    """What the bridge adds to the time to the first token, and throughput over that of the sync engines: medians of
    differences and ratios within a round, which a machine that is slower in some rounds changes little.
    """
    rows = []
    for base in (subject for subject in subjects if subject.name != "async"):
        for name in base.rounds:
            if name == "first_token_p50_us":
                rows.append([f"{name} over {base.name}", *(f"{_added(each, base, name):+,.0f}" for each in subjects)])
            elif name.endswith("tok_s"):
                rows.append([f"{name} / {base.name}", *(f"{_ratio(each, base, name):.3f}" for each in subjects)])
    return rows


def _added(subject: BridgeSubject, base: BridgeSubject, name: str) -> float:
    return statistics.median(one - other for one, other in zip(subject.rounds[name], base.rounds[name], strict=True))


def _ratio(subject: BridgeSubject, base: BridgeSubject, name: str) -> float:
    return statistics.median(one / other for one, other in zip(subject.rounds[name], base.rounds[name], strict=True))


def print_table(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    main()
