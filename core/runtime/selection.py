"""Chooses the runtime of a model. Called once, by the worker."""

import logging
from typing import Any

from ...protocol import envs
from ..dtypes import AnyDType, DType
from ..lazy_torch import load_torch
from ..models.spec import ModelSpec
from .cpu_native import NativeRuntime
from .interface import Runtime

logger = logging.getLogger("corespan.core")

_QUANTIZATION_IN_TORCH = {
    "int8": "its weights are turned to float32 at every product, which saves memory and is slow",
    "gguf": "its weights are held in the engine's dtype instead of the file's own bits",
}


def make_runtime(spec: ModelSpec, dtype: AnyDType, block_size: int, quantization: str | None) -> Runtime[Any]:
    """The fastest that runs this model here. Says so where that is the reference, and why.

    Raises ValueError naming what to change where `VLLM_BATCH_INVARIANT=1` promises a request the same bits in any
    batch: only the native kernels keep that; oneDNN and torch's attention choose their order by the batch's shape.
    """
    obstacle = NativeRuntime.obstacle(spec, dtype, block_size)
    if obstacle is None:
        return NativeRuntime(spec, dtype, block_size, quantization)
    if envs.VLLM_BATCH_INVARIANT:
        raise ValueError(f"VLLM_BATCH_INVARIANT=1 cannot be kept: {obstacle}")
    if consequence := _QUANTIZATION_IN_TORCH.get(quantization or ""):
        logger.warning("quantization is %r, and torch runs this model: %s: %s", quantization, obstacle, consequence)
    elif DType.of(dtype) is DType.BFLOAT16:
        logger.warning("torch runs this model, slower than native kernels would: %s", obstacle)
    load_torch()
    from .cpu_torch import TorchRuntime

    return TorchRuntime(spec, dtype, block_size, quantization)
