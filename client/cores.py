"""How many cores this process may use. The launcher tells the core's process; the in-process client tells torch."""

import os
import sys
from collections.abc import Iterator

from ..protocol.control_groups import own_groups, read


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
    """In cores, of every control group that sets one."""
    for group in own_groups("cpu"):
        version_2 = read(group / "cpu.max")
        version_1 = f"{read(group / 'cpu.cfs_quota_us')} {read(group / 'cpu.cfs_period_us')}"
        quota, _, period = (version_2 or version_1).partition(" ")
        if quota.isdigit() and period.isdigit():  # not "max", -1 or nothing
            yield int(quota) / int(period)
