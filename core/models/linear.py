"""Matrix products with the weights of a model, one class a weight format. `make_linear` picks the fastest that fits."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from ..kernels.linear import SILU_MUL, PackedWeight
from .ops import TorchOps


class Linear(ABC):
    """y = x @ weight.T + bias, for x: [num_tokens, in_features] contiguous, y: [num_tokens, out_features]."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear(Linear):
    """The weight as it is: [out_features, in_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """The weight reordered once into oneDNN's blocked layout, which small batches gain most from."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        if not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        if dtype == torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        return dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class NativeLinear(Linear):
    """The weight packed for the native kernels, which read it once whatever the number of tokens."""

    epilogue = 0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = PackedWeight(weight, bias, self.epilogue)
        self.out_features, self.in_features = self.packed.out_features, self.packed.k

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x)


class NativeGatedLinear(NativeLinear):
    """Gate and up projections of an MLP and silu(gate) * up in one operation; see `GatedLinear`."""

    epilogue = SILU_MUL


class GatedLinear(Linear):
    """silu(gate) * up of a merged projection. Its weight: [2 * out_features, in_features], gate first."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, ops: TorchOps) -> None:
        self.gate_up = make_linear(weight, bias)
        self.ops = ops
        self.out_features, self.in_features = weight.shape[0] // 2, weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.silu_and_mul(self.gate_up(x))


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """weight: [out_features, in_features], bias: [out_features], both of the engine's dtype; they may be released."""
    if PackedWeight.supports(weight.dtype, *weight.shape):
        return NativeLinear(weight, bias)
    if PackedLinear.supports(weight.dtype):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def make_gated_linear(weight: torch.Tensor, bias: torch.Tensor | None, ops: TorchOps) -> Linear:
    """weight: [2 * out_features, in_features], gate first. The result gives silu(gate) * up."""
    if PackedWeight.supports(weight.dtype, *weight.shape) and weight.shape[0] % 32 == 0:
        return NativeGatedLinear(weight, bias)
    return GatedLinear(weight, bias, ops)
