"""How many cores this process may use. The launcher tells the core's process; the in-process client tells the core."""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..shared.cgroups import own_groups, read

_NODES = Path("/sys/devices/system/node")


def available_cores() -> int:
    """Its affinity, cut down to the least CPU quota of its control group and those around it. Rounded down: threads
    beyond a quota only spend it on waiting for each other, until all of them are stopped."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(math.floor(quota) for quota in _quotas())]))


def limit_threads() -> None:
    """Gives a core in this process `available_cores` threads. Whoever loaded torch before, or set OMP_NUM_THREADS, has
    decided already."""
    if "torch" in sys.modules or "OMP_NUM_THREADS" in os.environ:
        return
    from ..core import lazy_torch

    lazy_torch.limit_threads(available_cores())


def thread_places() -> str | None:
    """OMP_PLACES for threads that stay on their memory node: one place a node, of the processors that this process may
    use. None where there is one node only, and nothing to keep apart.
    """
    allowed = os.sched_getaffinity(0)
    nodes = sorted(_NODES.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    places = [sorted(allowed & set(_processors(read(node / "cpulist")))) for node in nodes]
    used = [f"{{{','.join(map(str, place))}}}" for place in places if place]
    return ",".join(used) if len(used) > 1 else None


def _processors(ranges: str) -> Iterator[int]:
    """Of a list such as "0-3,8"."""
    for span in filter(None, ranges.split(",")):
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _quotas() -> Iterator[float]:
    """In cores, of every control group that sets one."""
    for group in own_groups("cpu"):
        version_2 = read(group / "cpu.max")
        version_1 = f"{read(group / 'cpu.cfs_quota_us')} {read(group / 'cpu.cfs_period_us')}"
        quota, _, period = (version_2 or version_1).partition(" ")
        if quota.isdigit() and period.isdigit():  # not "max", -1 or nothing
            yield int(quota) / int(period)
