"""Seconds from process start to the first character of `corespan generate`, and where they go.

Three lines of JSON, medians of several runs: with the core in a process of its own, with the core in the same process,
and the parts of the latter, one after another. With --packing, weights are packed at each start, as by the first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "The capital of France is"
PHASES = Path(__file__).with_name("start_phases.py")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_start", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="short name, folder or .gguf file [%(default)s]")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="runs of each [%(default)s]")
    parser.add_argument("--packing", action="store_true", help="keep no packed weights")
    options = parser.parse_args()
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ({"CORESPAN_PACKED_CACHE_GIB": "0"} if options.packing else {})
    command = [sys.executable, "-c", "import sys; from corespan.server.cli import main; sys.exit(main())"]
    command += ["generate", "--model", options.model, "--max-tokens", "8", PROMPT]
    if not options.packing:
        seconds_to_first_character(command, environment)  # which fills the cache
    for processes in (2, 1):
        run_in = environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(processes - 1)}
        runs = [seconds_to_first_character(command, run_in) for _ in range(options.repeat)]
        print(
            json.dumps({"processes": processes, "first_token_s": median(runs), "runs": [round(run, 2) for run in runs]})
        )
    parts: dict[str, list[float]] = {}
    for _ in range(options.repeat):
        done = subprocess.run(
            [sys.executable, str(PHASES), str(time.time()), options.model, PROMPT],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name, seconds in json.loads(done.stdout.splitlines()[-1]).items():
            parts.setdefault(name, []).append(seconds)
    print(json.dumps({"parts_s": {name: median(runs, 3) for name, runs in parts.items()}}))


def median(runs: list[float], digits: int = 2) -> float:
    return round(statistics.median(runs), digits)


def seconds_to_first_character(command: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        spent = time.perf_counter() - began
        process.stdout.read()
    if not first or process.returncode != 0:
        raise SystemExit(f"corespan ended with status {process.returncode}; its messages are above")
    return spent


if __name__ == "__main__":
    main()
