"""How much memory the machine has left for this process, and how much of it the KV cache may take."""

from collections.abc import Iterator

import psutil

from ...shared.cgroups import own_groups, read
from ..dtypes import DType
from ..models.spec import ModelSpec

_CACHE_SHARE = 0.5
"""Of the memory that is free once the model is loaded, the share (times gpu_memory_utilization) the cache may take."""


def available_memory() -> int:
    """Bytes that can still be used: what the system has available, or what the tightest of the control groups around
    this process (a container's, a service's) has left, if that is less.
    """
    return max(0, min([int(psutil.virtual_memory().available), *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """Of every control group that sets a limit. Cached files that nobody uses give way."""
    for group in own_groups("memory"):
        limits = [read(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        used = read(group / "memory.current") or read(group / "memory.usage_in_bytes")
        set_limits = [int(limit) for limit in limits if limit.isdigit()]  # not "max" or nothing
        if set_limits and used.isdigit():
            yield min(set_limits) - int(used) + _idle_file_bytes(read(group / "memory.stat"))


def _idle_file_bytes(statistics: str) -> int:
    """Of the group and those within; version 1 names that sum "total_"."""
    figures = dict(line.split(maxsplit=1) for line in statistics.splitlines())
    return int(figures.get("total_inactive_file") or figures.get("inactive_file") or 0)


def kv_budget(available: int, utilization: float, needed: int) -> int:
    """Bytes that the KV cache may take: half of what is available, less what a step needs."""
    return max(0, int(available * _CACHE_SHARE * utilization) - needed)


def activation_bytes(spec: ModelSpec, dtype: DType, max_num_tokens: int, max_num_reqs: int) -> int:
    """An upper estimate of what one step needs besides weights and cache."""
    inner = max(layer.mlp.inner_size for layer in spec.layers)
    qkv = max(layer.attention.qkv_size for layer in spec.layers)
    channels = 6 * spec.hidden_size + 3 * inner + 3 * qkv
    logits = 4 * spec.vocab_size * DType.FLOAT32.itemsize
    return max_num_tokens * channels * dtype.itemsize + max_num_reqs * logits
