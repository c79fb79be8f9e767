"""Matrix products in torch, one class a weight format: what the reference runtime multiplies with."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from ..kernels.linear import Rows, quantize_rows, slabs


class Linear(ABC):
    """y = x @ weight.T + bias, for x: [num_tokens, in_features] contiguous, y: [num_tokens, out_features]."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear(Linear):
    """The weight as it is: [out_features, in_features]."""

    def __init__(self, weight: Rows, bias: torch.Tensor | None, device: torch.device | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = whole(weight).to(device)
        self.bias = None if bias is None else bias.to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """The weight reordered once into oneDNN's blocked layout, which small batches gain most from."""

    def __init__(self, weight: Rows, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = torch.ops.mkldnn._reorder_linear_weight(whole(weight))
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
        num_tokens = len(x)
        if (padding := rounded_up(num_tokens) - num_tokens) > 0:
            x = F.pad(x, (0, 0, 0, padding))
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")[:num_tokens]


def rounded_up(num_tokens: int) -> int:
    """Itself up to 8, then the next of four sizes to each doubling.

    oneDNN compiles and keeps code for every number of rows it meets: a millisecond and most of a megabyte each.
    """
    step = 1 << max((num_tokens - 1).bit_length() - 3, 0)
    return -(-num_tokens // step) * step


class Int8Linear(Linear):
    """int8 weights with one scale to each output, x quantised as it comes with one scale to every 32 values: what the
    native kernels compute, in float32."""

    def __init__(self, weight: Rows, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = torch.empty(self.out_features, self.in_features, dtype=torch.int8)
        self.scales = torch.empty(self.out_features)
        for first, rows in slabs(weight):
            end = first + rows.shape[0]
            self.weight[first:end], self.scales[first:end] = quantize_rows(rows.float())
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize_rows(x.float().view(-1, 32 if self.in_features % 32 == 0 else self.in_features))
        rounded = (values * scales[:, None]).view(x.shape)
        y = F.linear(rounded, self.weight.float()).mul_(self.scales)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)


def whole(rows: Rows) -> torch.Tensor:
    """All rows as one matrix, in memory of its own."""
    matrix = torch.empty(*rows.shape, dtype=rows[0:1].dtype)
    for first, slab in slabs(rows):
        matrix[first : first + slab.shape[0]] = slab
    return matrix
