"""What a single stream and a batch keep of their quiet speed beside busy neighbours, which this program starts itself.

A neighbour is a process that counts without end. Quiet and disturbed generations take turns, so that both meet the same
machine; the engine runs in a process of its own, as by default. Prints tokens per second of each, and their ratio: with
one neighbour on 2 cores, a fair share of the cores is two thirds.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from corespan import LLM, SamplingParams

NEIGHBOUR = "while True: pass"
WORKLOADS = {"single stream": 1, "batch": 32}  # sequences


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many busy processes."""
    processes = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens_per_second(llm: LLM, sequences: int, tokens: int) -> float:
    prompts = [{"prompt_token_ids": [100 + number, *range(200, 215)]} for number in range(sequences)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return sequences * tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_neighbour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name or folder of the model (default: %(default)s)")
    parser.add_argument("--neighbours", type=int, default=1, help="busy processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of one quiet and one disturbed generation")
    parser.add_argument("--tokens", type=int, default=128, help="to each sequence")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further engine arguments, as JSON")
    options = parser.parse_args()
    llm = LLM(options.model, max_model_len=1024, max_num_seqs=max(WORKLOADS.values()), **options.engine_args)
    print(f"{len(os.sched_getaffinity(0))} cores, {options.neighbours} busy neighbours, load {os.getloadavg()[0]:.1f}")
    for name, sequences in WORKLOADS.items():
        tokens_per_second(llm, sequences, 8)  # warm up
        quiet, disturbed = [], []
        for _ in range(options.rounds):
            quiet.append(tokens_per_second(llm, sequences, options.tokens))
            with neighbours(options.neighbours):
                disturbed.append(tokens_per_second(llm, sequences, options.tokens))
        alone, beside = statistics.median(quiet), statistics.median(disturbed)
        print(f"{name:14} quiet {alone:8.1f} tok/s  beside {beside:8.1f} tok/s  keeps {beside / alone:.0%}", flush=True)


if __name__ == "__main__":
    main()
