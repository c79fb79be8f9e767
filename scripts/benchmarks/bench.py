"""Runs the three workloads on corespan, and on other engines beside it; prints one JSON line for each engine.

Every engine stays loaded in a process of its own; workloads go round the engines in turn, --repeat times, and medians
are reported, so that a machine whose speed drifts treats all alike. Quote ratios, not absolute figures.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from subjects import BENCHMARKS, CORESPAN_KINDS, Subject, checkout, corespan_command, load_pyplot, print_columns
from workloads import WORKLOADS

from corespan.protocol.config import Quantization

QUANTIZATIONS = get_args(Quantization)
SHAPES = ("1b", "qwen3-0.6b")
FILES = ("folder", "Q4_0", "Q8_0", "Q4_K_M")
PEERS = {  # name: (runner, whether it reads the GGUF itself)
    "transformers": ("run_transformers.py", False),
    "vllm": ("run_vllm.py", False),
    "openvino": ("run_openvino.py", True),
    "llama.cpp": ("run_llama_cpp.py", True),
}


def main() -> None:
    options = parse_options()
    if options.shape:
        options.model = str(model_of_shape(options.shape, options.file))
        options.engine_args["skip_tokenizer_init"] = True
    with contextlib.ExitStack() as stack:
        subjects: list[Subject] = []
        for name, command, environment in subject_commands(options, stack):
            subjects.append(Subject(name, command, environment))
            stack.callback(subjects[-1].close)
        rates: dict[str, dict[str, list[float]]] = {subject.name: {} for subject in subjects}
        for number in range(options.repeat):
            for workload in options.workloads:
                for subject in subjects:
                    rates[subject.name].setdefault(workload, []).append(rate := subject.measure(workload))
                    progress = f"round {number + 1} of {options.repeat}: {subject.name}"
                    print(f"{progress}: {rate:,.1f} {WORKLOADS[workload].unit}", file=sys.stderr, flush=True)
    summaries = [summary(subject, rates[subject.name]) for subject in subjects]
    for each in summaries:
        print(json.dumps(each), flush=True)
    if options.roofline:
        limits = roofline(options.model)
        print(*map(json.dumps, limits), sep="\n", flush=True)
        summaries += limits
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
    add("--shape", choices=SHAPES, help="in place of a model: random weights of a usual shape, kept in the cache")
    add(
        "--file", choices=FILES, default="Q4_K_M", help="which file of the shape: bf16, or GGUF of a kind [%(default)s]"
    )
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
        for suffix, environment in revisions.items():
            command = corespan_command(options.model, kind, json.dumps(engine_args))
            yield f"corespan {engine}{suffix}", command, environment


def summary(subject: Subject, rates: dict[str, list[float]]) -> dict[str, object]:
    medians = {WORKLOADS[name].unit: round(statistics.median(each), 1) for name, each in rates.items()}
    spread = {name: [round(min(each), 1), round(max(each), 1)] for name, each in rates.items()}
    return subject.introduction | {"engine": subject.name} | medians | {"spread": spread}


def model_of_shape(shape: str, file: str) -> Path:
    from shapes import shape_model

    from corespan.shared.cache_folder import cache_dir

    return shape_model(shape, file, cache_dir())


def peer_model(model: str, reads_gguf: bool) -> str:
    from hf_folder import hf_folder

    from corespan.engine.model_files.model_source import resolve_model
    from corespan.shared.cache_folder import cache_dir

    path = Path(resolve_model(model, with_tokenizer=False).path)
    if path.suffix != ".gguf":
        if reads_gguf:
            raise SystemExit(f"{path} is not a GGUF file, which this peer needs")
        return str(path)
    return str(path if reads_gguf else hf_folder(path, cache_dir()))


def roofline(model: str) -> list[dict]:
    """The lines of `roofline.py`, measured in a process of its own, after the engines have gone."""
    command = [sys.executable, str(BENCHMARKS / "roofline.py"), model]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


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
    print_columns(rows)


def plot(summaries: list[dict], path: Path) -> None:
    pyplot = load_pyplot()
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
