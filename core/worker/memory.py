"""How much memory the machine has left for this process, and whether a model fits. The worker asks before it loads."""

import math
from collections.abc import Iterator

import psutil
import torch

from ...protocol.config import ModelConfig
from ...shared.control_groups import own_groups, read
from ..models.decoder import EMBEDDING, expected_tensors, head_projection, layer_projections
from ..models.decoder_config import DecoderConfig
from ..models.loader import open_checkpoint
from ..models.tensor_source import TensorSource
from ..models.weight_format import plan_matrix

GIB = 1 << 30


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


def weight_bytes(
    config: DecoderConfig, dtype: torch.dtype, quantization: str | None, source: TensorSource
) -> tuple[int, int]:
    """What the model takes once loaded, and at most while it is. A tied head is held a second time, packed."""
    shapes = expected_tensors(config)
    projections = [head_projection(config)]
    projections += (each for index in range(config.num_layers) for each in layer_projections(config, index))
    plans = [plan_matrix(each, shapes, source.block_kinds, dtype, quantization) for each in projections]
    in_products = {f"{name}.weight" for projection in projections for name in projection.names}
    plain = [shape for name, shape in shapes.items() if name not in in_products or name == EMBEDDING]
    loaded = sum(plan.num_bytes for plan in plans) + sum(math.prod(shape) * dtype.itemsize for shape in plain)
    return loaded, loaded + max(plan.loading_bytes for plan in plans)


def activation_bytes(config: DecoderConfig, dtype: torch.dtype, max_num_tokens: int, max_num_reqs: int) -> int:
    """An upper estimate of what one step needs besides weights and cache."""
    channels = 6 * config.hidden_size + 3 * config.intermediate_size + 3 * (config.q_size + 2 * config.kv_size)
    logits = 4 * config.vocab_size * torch.float32.itemsize
    return max_num_tokens * channels * dtype.itemsize + max_num_reqs * logits


def check_model_fits(model_config: ModelConfig, config: DecoderConfig, dtype: torch.dtype) -> None:
    """Raises ValueError with the figures when loading the weights alone takes more memory than is left."""
    model, quantization = model_config.model, model_config.quantization
    kept_as = quantization or str(dtype).removeprefix("torch.")
    with open_checkpoint(model) as source:
        _, needed = weight_bytes(config, dtype, quantization, source)
    available = available_memory()
    if needed > available:
        raise ValueError(
            f"{model} needs {needed / GIB:.2f} GiB to load its weights as {kept_as}, "
            f"and only {available / GIB:.2f} GiB of memory are available"
        )
