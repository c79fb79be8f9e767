"""What this process and the cores behind it hold of the machine: memory, descriptors, threads, processes, folders."""

import glob
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass

import psutil

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Footprint:
    """`shell` is this process, `cores` are its children, largest first. Memory is resident, in MB."""

    seconds: float
    shell_rss: float
    core_rss: tuple[float, ...]
    num_fds: int
    num_threads: int
    num_folders: int


def take_footprint() -> Footprint:
    shell = psutil.Process()
    return Footprint(
        time.monotonic(),
        shell.memory_info().rss / MEGABYTE,
        tuple(sorted(map(_rss, shell.children(recursive=True)), reverse=True)),
        shell.num_fds(),
        threading.active_count(),
        len(glob.glob(os.path.join(os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir()), "corespan-*"))),
    )


def _rss(process: psutil.Process) -> float:
    try:
        return process.memory_info().rss / MEGABYTE
    except psutil.NoSuchProcess:
        return 0.0


def slope(x: list[float], y: list[float]) -> float:
    """Least squares: by how much y grows when x grows by one."""
    return statistics.linear_regression(x, y).slope
