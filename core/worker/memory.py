"""How much memory the machine has left for this process, and whether a model fits. The worker asks before it loads."""

import math
from pathlib import Path

import psutil
import torch

from ...protocol.config import ModelConfig
from ..kernels.linear import BlockWeight, PackedWeight
from ..models.decoder import expected_tensors
from ..models.decoder_config import DecoderConfig
from ..models.gguf import GGUFSource
from ..models.loader import open_checkpoint
from ..models.tensor_source import TensorSource

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


def weight_bytes(config: DecoderConfig, dtype: torch.dtype, quantization: str | None, source: TensorSource) -> int:
    """What the model takes once loaded. A tied head is held a second time, packed for matrix products."""
    embedding = "model.embed_tokens.weight"
    shapes = expected_tensors(config)
    total = 0
    for name, shape in shapes.items():
        is_matrix = len(shape) == 2 and name != embedding
        total += _matrix_bytes(name, shape, dtype, quantization, source) if is_matrix else _plain_bytes(shape, dtype)
    if config.tie_word_embeddings:
        total += _matrix_bytes(embedding, shapes[embedding], dtype, quantization, source)
    return total


def _matrix_bytes(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, quantization: str | None, source: TensorSource
) -> int:
    """One matrix in the format that `quantization` keeps it in."""
    rows, columns = shape
    if quantization == "int8":
        return rows * (columns + torch.float32.itemsize)
    if quantization == "gguf" and isinstance(source, GGUFSource) and PackedWeight.supports(dtype, rows, columns):
        tensor = source.tensors.get(name)
        if tensor is not None and BlockWeight.knows(tensor.quant_type.name):
            return tensor.num_bytes
    return _plain_bytes(shape, dtype)


def _plain_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def activation_bytes(config: DecoderConfig, dtype: torch.dtype, max_num_tokens: int, max_num_reqs: int) -> int:
    """An upper estimate of what one step needs besides weights and cache."""
    channels = 6 * config.hidden_size + 3 * config.intermediate_size + 3 * (config.q_size + 2 * config.kv_size)
    logits = 4 * config.vocab_size * torch.float32.itemsize
    return max_num_tokens * channels * dtype.itemsize + max_num_reqs * logits


def check_model_fits(model_config: ModelConfig, config: DecoderConfig, dtype: torch.dtype) -> None:
    """Raises ValueError with the figures when the weights alone exceed the memory that is left."""
    model, quantization = model_config.model, model_config.quantization
    kept_as = quantization or str(dtype).removeprefix("torch.")
    with open_checkpoint(model) as source:
        needed = weight_bytes(config, dtype, quantization, source)
    available = available_memory()
    if needed > available:
        raise ValueError(
            f"{model} needs {needed / GIB:.2f} GiB for its weights as {kept_as}, "
            f"and only {available / GIB:.2f} GiB of memory are available"
        )
