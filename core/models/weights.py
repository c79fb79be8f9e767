"""Reads the projections of a checkpoint and keeps each in the format that runs fastest. `Decoder` asks it for all its
matrices."""

import torch

from ..kernels.linear import SILU_MUL, STORE, BlockWeight, Int8Weight, PackedWeight
from .gguf import GGUFSource
from .linear import DenseLinear, GatedLinear, Int8Linear, Linear, NativeLinear, PackedLinear
from .ops import TorchOps
from .tensor_source import TensorSource


class ProjectionReader:
    """`quantization`: None, "int8" (one scale to each output, activations quantised as they come) or "gguf" (the
    file's own blocks where the kernels read their format, else the engine's dtype)."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, ops: TorchOps, quantization: str | None) -> None:
        self.source = source
        self.dtype = dtype
        self.ops = ops
        self.quantization = quantization

    def linear(self, names: list[str], bias: bool = False) -> Linear:
        """One product for several projections of the same input, their outputs side by side."""
        packed = self._packed(names, bias, STORE)
        return NativeLinear(packed) if packed is not None else self._plain(names, bias)

    def gated(self, names: list[str], bias: bool = False) -> Linear:
        """silu(gate) * up; `names` are the gate's and the up projection's."""
        packed = self._packed(names, bias, SILU_MUL)
        return NativeLinear(packed) if packed is not None else GatedLinear(self._plain(names, bias), self.ops)

    def _packed(self, names: list[str], bias: bool, epilogue: int) -> PackedWeight | None:
        """The weight in the native kernels' layout; None where they cannot run it."""
        rows, columns = self._shape(names)
        if not PackedWeight.supports(self.dtype, rows, columns) or (epilogue == SILU_MUL and rows % 32):
            return None
        if self.quantization == "gguf":
            packed = self._blocks(names, bias, epilogue)
            if packed is not None:
                return packed
        int8 = self.quantization == "int8" and Int8Weight.supports(self.dtype, rows, columns)
        return (Int8Weight if int8 else PackedWeight)(self._weight(names), self._bias(names, bias), epilogue)

    def _blocks(self, names: list[str], bias: bool, epilogue: int) -> PackedWeight | None:
        if not isinstance(self.source, GGUFSource):
            raise ValueError(f"quantization 'gguf' needs a .gguf file; {self.source.path} is none")
        parts = [self.source.read_blocks(f"{name}.weight") for name in names]
        kind = parts[0][0]
        if not BlockWeight.knows(kind) or any(part[0] != kind for part in parts):
            return None
        return BlockWeight(kind, torch.cat([blocks for _, blocks in parts]), self._bias(names, bias), epilogue)

    def _plain(self, names: list[str], bias: bool) -> Linear:
        weight, offset = self._weight(names), self._bias(names, bias)
        if self.quantization == "int8":
            return Int8Linear(weight, offset)
        if PackedLinear.supports(weight.dtype):
            return PackedLinear(weight, offset)
        return DenseLinear(weight, offset)

    def _shape(self, names: list[str]) -> tuple[int, int]:
        shapes = [self.source.shapes[f"{name}.weight"] for name in names]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def _weight(self, names: list[str]) -> torch.Tensor:
        return torch.cat([self.source.read(f"{name}.weight", self.dtype) for name in names])

    def _bias(self, names: list[str], bias: bool) -> torch.Tensor | None:
        return torch.cat([self.source.read(f"{name}.bias", self.dtype) for name in names]) if bias else None
