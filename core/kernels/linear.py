"""Matrix products with bf16 weights packed for the native kernels. `make_linear` of the models builds them."""

import ctypes

import torch

from . import library, memory

PANEL = 32
"""Output columns to a panel of packed weights."""

STORE, STORE_FLOAT32, SILU_MUL = range(3)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [n, k] bfloat16, k even. Returns panels [ceil(n / 32), k / 2, 32, 2], columns beyond n being zeros."""
    n, k = weight.shape
    weight = weight.contiguous()
    packed = memory.allocate((-(-n // PANEL), k // 2, PANEL, 2), torch.bfloat16)
    library.run(library.Pack(weight=weight.data_ptr(), out=packed.data_ptr(), n=n, k=k))
    return packed


class PackedWeight:
    """One packed matrix and its bias: y = epilogue(x @ weight.T + bias)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: int = STORE) -> None:
        """weight: [n, k] bfloat16, bias: [n]; SILU_MUL: gate rows first, n divisible by 32."""
        self.n, self.k = weight.shape
        if epilogue == SILU_MUL:
            weight, bias = _interleave(weight), None if bias is None else _interleave(bias)
        self.packed = pack(weight)
        self.bias = None
        if bias is not None:
            self.bias = torch.zeros(self.packed.shape[0] * PANEL)
            self.bias[: self.n] = bias
        self.epilogue = epilogue
        self.out_features = self.n // 2 if epilogue == SILU_MUL else self.n

    @staticmethod
    def supports(dtype: torch.dtype, out_features: int, in_features: int) -> bool:
        """False on CPUs with matrix tiles (AMX): oneDNN uses those, these kernels do not."""
        return (
            dtype == torch.bfloat16
            and in_features % 2 == 0
            and library.is_available()
            and not torch.cpu._is_amx_tile_supported()
        )

    def operation(self, rows: int, x: torch.Tensor, out: torch.Tensor) -> library.Gemm:
        """x: [>= rows, k] bfloat16; out: [>= rows, out_features]; rows: address of the number of rows to compute."""
        return library.Gemm(
            rows=rows,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            n=self.n,
            k=self.k,
            epilogue=STORE_FLOAT32 if out.dtype == torch.float32 else self.epilogue,
        )

    def __call__(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """x: [num_tokens, k] bfloat16. Returns [num_tokens, out_features] of `dtype`, bfloat16 or float32."""
        x = x.contiguous()
        rows = library.Int(x.shape[0])
        out = torch.empty(x.shape[0], self.out_features, dtype=dtype)
        library.run(self.operation(ctypes.addressof(rows), x, out))
        return out


def _interleave(rows: torch.Tensor) -> torch.Tensor:
    """Gate rows, then as many up rows -> 16 of one, 16 of the other, in turn."""
    halves = rows.view(2, -1, 16, *rows.shape[1:])
    return halves.transpose(0, 1).reshape(rows.shape)
