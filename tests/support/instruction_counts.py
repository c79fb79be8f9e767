"""Counts what fixed cases cost: instructions of the native kernels, under callgrind, and byte codes of the scheduler.
Run as a program it records the counts of this compiler and this Python beside those of others."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import corespan

ROOT = Path(corespan.__file__).parent
RECORD = ROOT / "tests" / "instruction_counts.json"
INSTRUCTION_SETS = ("portable", "avx2")
"""callgrind knows no AVX-512, whose paths have the same loops around other instructions."""

Counts = dict[str, int]


def compiler() -> str:
    """The one that built the kernels, such as "gcc 12"; their counts are no other's."""
    library = (ROOT / "core" / "kernels" / "_native.so").read_bytes()
    for name, pattern in (("gcc", rb"GCC: \([^)]*\) (\d+)"), ("clang", rb"clang version (\d+)")):
        if found := re.search(pattern, library):
            return f"{name} {found[1].decode()}"
    return "unknown compiler"


def kernels_key(isa: str) -> str:
    return f"{compiler()}, {platform.machine()}, {isa}"


def scheduler_key() -> str:
    """Each version of Python compiles to other byte code."""
    return f"python {sys.version_info.major}.{sys.version_info.minor}"


def count_kernels(isa: str) -> Counts:
    """Instructions within one call of the library, by case."""
    with tempfile.TemporaryDirectory() as folder:
        entry = f"{isa}::run(Op const*, long, int)"
        options = [f"--toggle-collect={entry}", f"--dump-after={entry}", f"--callgrind-out-file={folder}/out"]
        program = [sys.executable, str(Path(__file__).with_name("counted_kernels.py"))]
        environment = os.environ | {
            "CORESPAN_CPU_ISA": isa,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *filter(None, sys.path)]),
        }
        finished = subprocess.run(
            ["valgrind", "--tool=callgrind", *options, *program], env=environment, capture_output=True, text=True
        )
        if finished.returncode:
            raise RuntimeError(f"callgrind ended with status {finished.returncode}:\n{finished.stderr[-4000:]}")
        names = finished.stdout.splitlines()
        files = [Path(folder, f"out.{number}") for number in range(1, len(names) + 1)]
        return {name: _total(file) for name, file in zip(names, files, strict=True)}


def _total(file: Path) -> int:
    (total,) = re.findall(r"^totals: (\d+)$", file.read_text(), flags=re.MULTILINE)
    return int(total)


def count_scheduler() -> Counts:
    """Byte codes executed in a step, `schedule` and `update_from_output` together."""
    counts = {}
    for running, waiting in ((1, 0), (256, 0), (256, 1000)):
        counts[f"decode step, {running} running, {waiting} waiting"] = _decode_step(running, waiting)
    return counts


def _decode_step(running: int, waiting: int) -> int:
    """The mean of 16 steps, over which every request fills a block."""
    from scheduling import greedy, make_vllm_config

    from corespan.core.scheduler.request import Request
    from corespan.core.scheduler.runner_messages import ModelRunnerOutput
    from corespan.core.scheduler.scheduler import Scheduler
    from corespan.protocol.requests import EngineCoreRequest
    from corespan.protocol.resolved_sampling import resolved

    config = make_vllm_config(max_num_seqs=256, max_num_batched_tokens=8192, enable_prefix_caching=False)
    scheduler = Scheduler(config, num_gpu_blocks=2048)
    for number in range(running + waiting):
        request = EngineCoreRequest(str(number), [1] * 16, resolved(greedy(100)), handle=1 + number)
        scheduler.add_request(Request.from_engine_core_request(request, None))

    def step() -> None:
        planned = scheduler.schedule()
        scheduler.update_from_output(planned, ModelRunnerOutput(planned.rows, np.full(len(planned.rows), 7)))

    step()
    step()
    return sum(_byte_codes(step) for _ in range(16)) // 16


def _byte_codes(work: Callable[[], None]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def recorded() -> dict[str, Counts]:
    counts: dict[str, Counts] = json.loads(RECORD.read_text())
    return counts


def measure() -> Iterator[tuple[str, Counts]]:
    yield scheduler_key(), count_scheduler()
    if shutil.which("valgrind"):
        for isa in INSTRUCTION_SETS:
            yield kernels_key(isa), count_kernels(isa)
    else:
        print("valgrind is missing (apt-get install valgrind): the kernels' counts stay as they are", file=sys.stderr)


def main() -> None:
    counts = recorded() if RECORD.exists() else {}
    for key, found in measure():
        print(f"Recorded {len(found)} counts of {key}")
        counts[key] = found
    RECORD.write_text(json.dumps(counts, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
