"""The format that each matrix of a model is kept in, decided once: `weights.py` loads by it, and `worker/memory.py`
counts by it before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch

from ..kernels.linear import BLOCK_BYTES, PANEL, BlockWeight, Int8Weight, PackedWeight, loading_bytes
from .linear import PackedLinear


class WeightFormat(Enum):
    """NATIVE, NATIVE_INT8 and NATIVE_BLOCKS are packed for the native kernels, the others for torch."""

    NATIVE = auto()
    NATIVE_INT8 = auto()
    NATIVE_BLOCKS = auto()
    INT8 = auto()
    REORDERED = auto()
    DENSE = auto()


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices of a checkpoint that are one product, on top of one another. Gated: silu(first half) * second half."""

    names: tuple[str, ...]
    bias: bool = False
    gated: bool = False


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """One projection's format, and what it takes: `num_bytes` for good, `loading_bytes` more while it is read."""

    format: WeightFormat
    num_bytes: int
    loading_bytes: int


def plan_matrix(
    projection: Projection,
    shapes: Mapping[str, tuple[int, ...]],
    block_kinds: Mapping[str, str],
    dtype: torch.dtype,
    quantization: str | None,
) -> MatrixPlan:
    """`shapes`: of the checkpoint's tensors; `block_kinds`: the formats of those that lie in blocks (GGUF)."""
    names = [f"{name}.weight" for name in projection.names]
    rows, columns = sum(shapes[name][0] for name in names), shapes[names[0]][1]
    padded_rows = -(-rows // PANEL) * PANEL
    slab = loading_bytes(rows, columns)
    kinds = {block_kinds.get(name) for name in names}
    is_native = PackedWeight.supports(dtype, rows, columns) and not (projection.gated and rows % 32)
    if is_native and quantization == "gguf" and len(kinds) == 1 and BlockWeight.knows(kind := kinds.pop()):
        return MatrixPlan(WeightFormat.NATIVE_BLOCKS, padded_rows * columns // 32 * BLOCK_BYTES[kind], slab)
    if is_native and quantization == "int8" and Int8Weight.supports(dtype, rows, columns):
        return MatrixPlan(WeightFormat.NATIVE_INT8, padded_rows * (columns + 4), slab)
    if is_native:
        return MatrixPlan(WeightFormat.NATIVE, padded_rows * columns * dtype.itemsize, slab)
    if quantization == "int8":
        return MatrixPlan(WeightFormat.INT8, rows * (columns + 4), slab)
    num_bytes = rows * columns * dtype.itemsize
    if PackedLinear.supports(dtype):
        return MatrixPlan(WeightFormat.REORDERED, num_bytes, num_bytes + slab)
    return MatrixPlan(WeightFormat.DENSE, num_bytes, slab)
