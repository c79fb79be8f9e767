"""Engines under measurement, each loaded in a process of its own, and checkouts of other revisions of corespan."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent.parent

CORESPAN_KINDS = ("inproc", "multiprocess", "async")


class LineProcess:
    """One engine in its process, which answers each line with a line of JSON."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | environment, **pipes)

    def ask(self, line: str) -> dict:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}; its messages are above")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Subject(LineProcess):
    """One engine that runs workloads; `introduction` is what it says of itself once it is loaded."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(name, command, environment)
        self.introduction = self.read()

    def measure(self, workload: str, **sampling: object) -> float:
        """Tokens per second of one run. `sampling`: fields of SamplingParams, for corespan only."""
        return self.ask(f"{workload} {json.dumps(sampling)}")["tok_s"]


def corespan_command(model: str, kind: str, engine_args: str = "{}") -> list[str]:
    return [sys.executable, str(BENCHMARKS / "run_corespan.py"), model, kind, engine_args]


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[str]:
    """Another revision with its native kernels built; yields the folder to import `corespan` from.

    It is removed in the end, also where the benchmark is told to terminate.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="corespan-bench-") as folder:
        tree = Path(folder, "corespan")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), revision], check=True, stdout=2)
        try:
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            built = subprocess.run(build, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if built.returncode:
                raise SystemExit(built.stdout)
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, stdout=2)


def print_columns(rows: list[list[str]]) -> None:
    """A table of left-aligned columns, with an empty line before it."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def load_pyplot() -> Any:
    """matplotlib's pyplot, which draws into files. Ends the program where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
