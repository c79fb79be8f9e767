"""How many cores this process may use. The launcher tells the core's process; the in-process client tells torch."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Its affinity, cut down to the least CPU quota of its control group and those around it."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(round(quota) for quota in _quotas())]))


def limit_torch_threads() -> None:
    """Gives torch `available_cores` threads in this process. Whoever loaded torch before, or set OMP_NUM_THREADS, has
    decided already."""
    if "torch" in sys.modules or "OMP_NUM_THREADS" in os.environ:
        return
    import torch

    torch.set_num_threads(available_cores())


def _quotas() -> Iterator[float]:
    """In cores, of every control group that sets one; within a container the outer groups are out of sight."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own = PurePosixPath(path.lstrip("/"))
        if not controllers:
            folders = [_GROUPS / group for group in (own, *own.parents)]
            texts = [_read(folder / "cpu.max") for folder in folders]
        elif "cpu" in controllers.split(","):
            folders = [_GROUPS / "cpu" / group for group in (own, *own.parents)]
            texts = [
                f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}" for folder in folders
            ]
        else:
            continue
        for text in texts:
            quota, _, period = text.strip().partition(" ")
            if quota.isdigit() and period.isdigit():  # not "max", -1 or nothing
                yield int(quota) / int(period)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
