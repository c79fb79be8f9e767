"""Reads the projections of a checkpoint and keeps each in the format that runs fastest. `Decoder` asks it for all its
matrices. Nothing is read as a whole: slabs of rows pass through, so that a load needs little more than it leaves."""

from collections.abc import Sequence

import torch

from ..kernels.linear import SILU_MUL, STORE, BlockWeight, Int8Weight, PackedWeight, slabs
from .gguf import GGUFSource
from .linear import DenseLinear, GatedLinear, Int8Linear, Linear, NativeLinear, PackedLinear
from .ops import TorchOps
from .tensor_source import TensorSource
from .weight_format import Projection, WeightFormat, plan_matrix


class ProjectionReader:
    """`quantization`: None, "int8" (one scale to each output, activations quantised as they come) or "gguf" (the
    file's own blocks where the kernels read their format, else the engine's dtype)."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, ops: TorchOps, quantization: str | None) -> None:
        """Raises ValueError for "gguf" of another file."""
        if quantization == "gguf" and not isinstance(source, GGUFSource):
            raise ValueError(f"quantization 'gguf' needs a .gguf file; {source.path} is none")
        self.source = source
        self.dtype = dtype
        self.ops = ops
        self.quantization = quantization

    def read(self, projection: Projection) -> Linear:
        """One product for all its parts, their outputs side by side, or gated."""
        plan = plan_matrix(projection, self.source.shapes, self.source.block_kinds, self.dtype, self.quantization)
        bias = self._bias(projection)
        epilogue = SILU_MUL if projection.gated else STORE
        if plan.format is WeightFormat.NATIVE_BLOCKS:
            return NativeLinear(self._blocks(projection, bias, epilogue))
        rows = _MergedRows(self.source, [f"{name}.weight" for name in projection.names], self.dtype)
        if plan.format is WeightFormat.NATIVE_INT8:
            return NativeLinear(Int8Weight(rows, bias, epilogue))
        if plan.format is WeightFormat.NATIVE:
            return NativeLinear(PackedWeight(rows, bias, epilogue))
        plain = self._plain(plan.format, rows, bias)
        return GatedLinear(plain, self.ops) if projection.gated else plain

    def read_matrix(self, name: str) -> torch.Tensor:
        """One matrix as it is, in memory of its own."""
        return _whole(_MergedRows(self.source, [name], self.dtype))

    def _blocks(self, projection: Projection, bias: torch.Tensor | None, epilogue: int) -> BlockWeight:
        assert isinstance(self.source, GGUFSource)
        names = [f"{name}.weight" for name in projection.names]
        return BlockWeight(self.source.block_kinds[names[0]], _MergedRows(self.source, names, None), bias, epilogue)

    def _plain(self, weight_format: WeightFormat, rows: "_MergedRows", bias: torch.Tensor | None) -> Linear:
        if weight_format is WeightFormat.INT8:
            return Int8Linear(rows, bias)
        if weight_format is WeightFormat.REORDERED:
            return PackedLinear(_whole(rows), bias)
        return DenseLinear(_whole(rows), bias)

    def _bias(self, projection: Projection) -> torch.Tensor | None:
        if not projection.bias:
            return None
        return torch.cat([self.source.read(f"{name}.bias", self.dtype) for name in projection.names])


class _MergedRows:
    """Matrices of a checkpoint on top of one another, read a slice of rows at a time. Without a dtype: their blocks, as
    they lie in the file.
    """

    def __init__(self, source: TensorSource, names: Sequence[str], dtype: torch.dtype | None) -> None:
        self._source, self._names, self._dtype = source, names, dtype
        self._counts = [source.shapes[name][0] for name in names]
        width = source.shapes[names[0]][1] if dtype is not None else self._read(names[0], 0, 1).shape[1]
        self.shape = sum(self._counts), width

    def __getitem__(self, rows: slice) -> torch.Tensor:
        first, end, _ = rows.indices(self.shape[0])
        parts, start = [], 0
        for name, count in zip(self._names, self._counts, strict=True):
            own_first, own_end = max(first - start, 0), min(end - start, count)
            if own_first < own_end:
                parts.append(self._read(name, own_first, own_end))
            start += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, name: str, first: int, end: int) -> torch.Tensor:
        if self._dtype is not None:
            return self._source.read(name, self._dtype, slice(first, end))
        assert isinstance(self._source, GGUFSource)
        return self._source.read_blocks(name, slice(first, end))


def _whole(rows: _MergedRows) -> torch.Tensor:
    first_rows = rows[0:1]
    whole = torch.empty(rows.shape, dtype=first_rows.dtype)
    for first, slab in slabs(rows):
        whole[first : first + slab.shape[0]] = slab
    return whole
