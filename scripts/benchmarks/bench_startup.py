"""Seconds from process start to the first character of a completion: scripts/run beside transformers, model cached.

Runs alternate; one JSON line each with the median and all runs. transformers reads a bf16 folder, its quickest way in.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
PROMPT = "The capital of France is"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_startup", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="short name or .gguf file [%(default)s]")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="runs of each [%(default)s]")
    options = parser.parse_args()
    from hf_folder import hf_folder

    from corespan.engine.model_files.model_source import resolve_model
    from corespan.shared.cache_folder import cache_dir

    gguf = Path(resolve_model(options.model).path)
    folder = hf_folder(gguf, cache_dir())
    subjects = {
        "corespan": [str(BENCHMARKS.parent / "run"), "--model", str(gguf), "--max-tokens", "8", PROMPT],
        "transformers": [sys.executable, str(BENCHMARKS / "start_transformers.py"), str(folder), PROMPT],
    }
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(options.repeat):
        for name, command in subjects.items():
            seconds[name].append(seconds_to_first_character(name, command))
    for name, runs in seconds.items():
        figures = {
            "startup_to_first_token_s": round(statistics.median(runs), 2),
            "runs": [round(run, 2) for run in runs],
        }
        print(json.dumps({"engine": name} | figures))


def seconds_to_first_character(name: str, command: list[str]) -> float:
    began = time.perf_counter()
    environment = os.environ | {"VIRTUAL_ENV": sys.prefix, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        first = process.stdout.read(1)
        spent = time.perf_counter() - began
        process.stdout.read()
    if not first or process.returncode != 0:
        raise SystemExit(f"{name} ended with status {process.returncode}; its messages are above")
    return spent


if __name__ == "__main__":
    main()
