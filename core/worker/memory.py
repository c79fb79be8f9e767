"""How much memory the machine has left for this process, and whether a model fits. The worker asks before it loads."""

import math
from pathlib import Path

import psutil
import torch

from ..models.decoder import expected_tensors
from ..models.decoder_config import DecoderConfig

GIB = 1 << 30

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def available_memory() -> int:
    """Bytes that can still be used: what the system has available, or the container's limit allows, if that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file, stat_file in _CGROUP_FILES:
        try:
            limit = int(Path(limit_file).read_text())
            used = int(Path(usage_file).read_text())
            statistics = dict(line.split() for line in Path(stat_file).read_text().splitlines())
        except (OSError, ValueError):  # no such control group, or "max": no limit
            continue
        return max(0, min(available, limit - used + int(statistics.get("inactive_file", 0))))
    return available


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """What the model takes once loaded. A tied head is held a second time, packed for matrix products."""
    num_elements = sum(math.prod(shape) for shape in expected_tensors(config).values())
    if config.tie_word_embeddings:
        num_elements += config.vocab_size * config.hidden_size
    return num_elements * dtype.itemsize


def activation_bytes(config: DecoderConfig, dtype: torch.dtype, max_num_tokens: int, max_num_reqs: int) -> int:
    """An upper estimate of what one step needs besides weights and cache."""
    channels = 6 * config.hidden_size + 3 * config.intermediate_size + 3 * (config.q_size + 2 * config.kv_size)
    logits = 4 * config.vocab_size * torch.float32.itemsize
    return max_num_tokens * channels * dtype.itemsize + max_num_reqs * logits


def check_model_fits(model: str, config: DecoderConfig, dtype: torch.dtype) -> None:
    """Raises ValueError with the figures when the weights alone exceed the memory that is left."""
    needed, available = weight_bytes(config, dtype), available_memory()
    if needed > available:
        raise ValueError(
            f"{model} needs {needed / GIB:.2f} GiB for its weights as {str(dtype).removeprefix('torch.')}, "
            f"and only {available / GIB:.2f} GiB of memory are available"
        )
