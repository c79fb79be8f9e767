"""Runs the three workloads on corespan, and on other engines beside it; prints one JSON line for each engine.

Every engine stays loaded in a process of its own; workloads go round the engines in turn, --repeat times, and medians
are reported, so that a machine whose speed drifts treats all alike. Quote ratios, not absolute figures.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from workloads import WORKLOADS

from corespan.engine.engine_args import Quantization

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent.parent

CORESPAN_KINDS = ("inproc", "multiprocess", "async")
QUANTIZATIONS = get_args(Quantization)
PEERS = {  # name: (runner, whether it reads the GGUF itself)
    "transformers": ("run_transformers.py", False),
    "vllm": ("run_vllm.py", False),
    "openvino": ("run_openvino.py", True),
    "llama.cpp": ("run_llama_cpp.py", True),
}


class Subject:
    """One engine in its process, spoken to line by line."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | environment, **pipes)
        self.introduction = self._read()
        self.rates: dict[str, list[float]] = {}

    def measure(self, workload: str) -> None:
        self.process.stdin.write(workload + "\n")
        self.process.stdin.flush()
        self.rates.setdefault(workload, []).append(self._read()["tok_s"])

    def summary(self) -> dict[str, object]:
        medians = {WORKLOADS[name].unit: round(statistics.median(rates), 1) for name, rates in self.rates.items()}
        spread = {name: [round(min(rates), 1), round(max(rates), 1)] for name, rates in self.rates.items()}
        return self.introduction | {"engine": self.name} | medians | {"spread": spread}

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}; its messages are above")
        return json.loads(line)


def main() -> None:
    options = parse_options()
    with contextlib.ExitStack() as stack:
        subjects: list[Subject] = []
        for name, command, environment in subject_commands(options, stack):
            subjects.append(Subject(name, command, environment))
            stack.callback(subjects[-1].close)
        for _ in range(options.repeat):
            for workload in options.workloads:
                for subject in subjects:
                    subject.measure(workload)
    summaries = [subject.summary() for subject in subjects]
    for summary in summaries:
        print(json.dumps(summary), flush=True)
    if options.roofline:
        summaries.append(roofline(options.model))
        print(json.dumps(summaries[-1]), flush=True)
    if options.table:
        print_table(summaries)
    if options.plot:
        plot(summaries, options.plot)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    engines = (
        f"{', '.join(CORESPAN_KINDS)}, each also as NAME:{' or NAME:'.join(QUANTIZATIONS)} for quantised weights; "
        f"peers: {', '.join(PEERS)} [inproc multiprocess]"
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="short name or .gguf file; peers need a GGUF [%(default)s]")
    add("--engines", nargs="+", type=engine_name, default=["inproc", "multiprocess"], metavar="NAME", help=engines)
    add("--peers", type=Path, metavar="VENV", help="virtual environment that holds the peers [this one]")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help="further EngineArgs fields for corespan")
    add("--compare", metavar="REV", help="measure this git revision of corespan beside the working tree")
    add("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME", help="[all]")
    add("--repeat", type=int, default=3, metavar="N", help="runs of each workload [%(default)s]")
    add("--roofline", action="store_true", help="measure the machine's own limits in the same sitting")
    add("--table", action="store_true", help="print a table of ratios to the first engine as well")
    add("--plot", type=Path, metavar="FILE.png", help="draw the figures; needs matplotlib")
    return parser.parse_args()


def engine_name(name: str) -> str:
    kind, separator, quantization = name.partition(":")
    if name in PEERS or (kind in CORESPAN_KINDS and (not separator or quantization in QUANTIZATIONS)):
        return name
    known = ", ".join((*CORESPAN_KINDS, *PEERS))
    raise argparse.ArgumentTypeError(
        f"{name!r} is no engine; known are {known}, corespan's also with {' or '.join(QUANTIZATIONS)} behind a colon"
    )


def subject_commands(
    options: argparse.Namespace, stack: contextlib.ExitStack
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yields (name, command line, environment) for every engine asked for."""
    revisions: dict[str, dict[str, str]] = {"": {}}
    if options.compare:
        revisions[f"@{options.compare}"] = {"PYTHONPATH": stack.enter_context(checkout(options.compare))}
    for engine in options.engines:
        if engine in PEERS:
            script, reads_gguf = PEERS[engine]
            python = str(options.peers / "bin" / "python") if options.peers else sys.executable
            yield engine, [python, str(BENCHMARKS / script), peer_model(options.model, reads_gguf)], {}
            continue
        kind, _, quantization = engine.partition(":")
        engine_args = options.engine_args | ({"quantization": quantization} if quantization else {})
        script = str(BENCHMARKS / "run_corespan.py")
        for suffix, environment in revisions.items():
            command = [sys.executable, script, options.model, kind, json.dumps(engine_args)]
            yield f"corespan {engine}{suffix}", command, environment


def peer_model(model: str, reads_gguf: bool) -> str:
    from hf_folder import hf_folder

    from corespan.engine.hub import cache_dir
    from corespan.engine.model_source import resolve_model

    path = Path(resolve_model(model, with_tokenizer=False).path)
    if path.suffix != ".gguf":
        if reads_gguf:
            raise SystemExit(f"{path} is not a GGUF file, which this peer needs")
        return str(path)
    return str(path if reads_gguf else hf_folder(path, cache_dir()))


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[str]:
    """Another revision with its native kernels built; yields the folder to import `corespan` from."""
    with tempfile.TemporaryDirectory(prefix="corespan-bench-") as folder:
        tree = Path(folder, "corespan")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), revision], check=True, stdout=2)
        try:
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, check=True, stdout=2)
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, stdout=2)


def roofline(model: str) -> dict[str, object]:
    """Measured in a process of its own, after the engines have gone."""
    command = [sys.executable, str(BENCHMARKS / "roofline.py"), model]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def print_table(summaries: list[dict]) -> None:
    """Rows are engines; beside each figure stands its ratio to the first engine's."""
    units = [workload.unit for workload in WORKLOADS.values() if workload.unit in summaries[0]]
    rows = [["engine", *units]]
    for summary in summaries:
        row = [summary["engine"]]
        for unit in units:
            figure = summary.get(unit)
            row.append("" if figure is None else f"{figure:,.1f} ({figure / summaries[0][unit]:.2f}x)")
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def plot(summaries: list[dict], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    units = [workload.unit for workload in WORKLOADS.values() if workload.unit in summaries[0]]
    figure, axes = pyplot.subplots(
        1, len(units), figsize=(4.5 * len(units), 0.45 * len(summaries) + 1.5), squeeze=False
    )
    for axis, unit in zip(axes[0], units, strict=True):
        shown = [summary for summary in summaries if unit in summary]
        bars = axis.barh([summary["engine"] for summary in shown], [summary[unit] for summary in shown])
        axis.bar_label(bars, fmt="{:,.0f}", padding=3)
        axis.set_title(unit)
        axis.invert_yaxis()
        axis.margins(x=0.18)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
