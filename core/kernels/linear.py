"""Matrix products with weights packed for the native kernels: bf16, int8, and GGUF's own blocks."""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeGuard

import numpy as np

from ..dtypes import AnyDType, DType
from ..lazy_torch import torch
from . import library
from .header import NUMBERS
from .memory import Array, Buffer, Keep, allocate, as_buffer, keep_new

PANEL = NUMBERS["PANEL"]
"""Output columns to a panel of packed weights."""

STORE, STORE_FLOAT32, SILU_MUL, GELU_MUL = (
    NUMBERS[name] for name in ("STORE", "STORE_FLOAT32", "SILU_MUL", "GELU_MUL")
)
_GATED = (SILU_MUL, GELU_MUL)

BF16, INT8 = NUMBERS["BF16"], NUMBERS["INT8"]
_BLOCK = NUMBERS["GROUP"]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One of GGUF's: `size` values of a row lie together, in `file_bytes`, and take `packed_bytes` when packed. x is
    quantised with one scale to every `x_block` values."""

    number: int
    size: int
    file_bytes: int
    packed_bytes: int
    x_block: int = _BLOCK


BLOCK_FORMATS = {
    "Q8_0": BlockFormat(NUMBERS["Q8_0"], 32, 34, 34),
    "Q4_0": BlockFormat(NUMBERS["Q4_0"], 32, 18, 18),
    "Q4_1": BlockFormat(NUMBERS["Q4_1"], 32, 20, 20),
    "Q5_0": BlockFormat(NUMBERS["Q5_0"], 32, 22, 22),
    "Q5_1": BlockFormat(NUMBERS["Q5_1"], 32, 24, 24),
    "Q4_K": BlockFormat(NUMBERS["Q4_K"], 256, 144, 148),
    "Q5_K": BlockFormat(NUMBERS["Q5_K"], 256, 176, 180),
    "Q6_K": BlockFormat(NUMBERS["Q6_K"], 256, 210, 210, x_block=16),
}

SLAB_VALUES = 1 << 22


def loading_bytes(rows: int, columns: int) -> int:
    """What packing or quantising a weight takes besides its result: a slab of rows, read, merged and put in order in
    bf16, and three times in float32. An upper estimate.
    """
    return 24 * min(rows * columns, max(SLAB_VALUES, PANEL * columns))


def block_bytes(kind: str, rows: int, columns: int) -> int:
    """What a matrix in blocks takes when packed."""
    block = BLOCK_FORMATS[kind]
    return -(-rows // PANEL) * PANEL * (columns // block.size) * block.packed_bytes


def block_loading_bytes(kind: str, rows: int, columns: int) -> int:
    """As `loading_bytes`, where blocks are packed as they lie: a slab of them, read, merged and put in order."""
    block = BLOCK_FORMATS[kind]
    row_bytes = columns // block.size * block.file_bytes
    return 3 * min(rows * row_bytes, max(SLAB_VALUES, PANEL * row_bytes))


class Rows(Protocol):
    """A matrix, or what gives slices of one's rows as tensors."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


def slabs(weight: Rows, epilogue: int = STORE) -> Iterator[tuple[int, torch.Tensor]]:
    """All rows in the order they are packed in, some whole panels at a time: (the first one's place, the rows)."""
    n, width = weight.shape[0], math.prod(weight.shape[1:])
    step = max(SLAB_VALUES // width // PANEL, 1) * PANEL
    for first in range(0, n, step):
        end = min(first + step, n)
        if epilogue in _GATED:
            gate, up = weight[first // 2 : end // 2], weight[(n + first) // 2 : (n + end) // 2]
            yield first, _ordered(torch.cat([gate, up]), epilogue)
        else:
            yield first, weight[first:end].contiguous()


class PackedWeight:
    """One packed bf16 matrix and its bias: y = epilogue(x @ weight.T + bias)."""

    format = BF16

    def __init__(self, weight: Rows, bias: Rows | None, epilogue: int = STORE, keep: Keep = keep_new) -> None:
        """weight: [n, k] bfloat16, bias: [n]; SILU_MUL, GELU_MUL: gate rows first, n divisible by 32."""
        self._set_up(weight.shape[0], weight.shape[1], 2 * weight.shape[1], epilogue)
        self._keep(weight, bias, keep)

    def _set_up(self, n: int, k: int, row_bytes: int, epilogue: int) -> None:
        self.n, self.k, self.epilogue = n, k, epilogue
        self.out_features = n // 2 if epilogue in _GATED else n
        self._row_bytes = row_bytes

    def _keep(self, weight: Rows, bias: Rows | None, keep: Keep) -> None:
        panels = -(-self.n // PANEL)
        self.bias: Buffer | None = None
        if bias is not None:
            self.bias = keep((panels * PANEL,), np.float32, partial(self._fill_bias, bias))
        shape = (panels * PANEL * self._row_bytes,)
        self.packed = keep(shape, np.uint8, partial(self._fill, weight), self._place)

    def _fill_bias(self, bias: Rows, out: Buffer) -> None:
        out[: self.n] = as_buffer(_ordered(bias[0 : self.n], self.epilogue).float())

    def _place(self, out: Buffer) -> None:
        library.run(library.Place(format=self.format, out=out.data_ptr(), n=self.n, k=self.k))

    def _fill(self, weight: Rows, out: Buffer) -> None:
        for first, rows in slabs(weight, self.epilogue):
            self._pack(self._values(rows, first), out.data_ptr() + first * self._row_bytes)

    def _values(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """What is packed of `rows`, which in packed order begin with row `first` of the whole, a multiple of PANEL."""
        return rows

    def _pack(self, rows: torch.Tensor, address: int) -> None:
        library.run(library.Pack(format=self.format, weight=rows.data_ptr(), out=address, n=rows.shape[0], k=self.k))

    @staticmethod
    def supports(dtype: AnyDType, out_features: int, in_features: int) -> bool:
        return DType.of(dtype) is DType.BFLOAT16 and in_features % 2 == 0 and library.is_available()

    def operations(
        self, rows: int, x: Array, out: Array, scratch: QuantizedRows | None = None
    ) -> list[library.Operation]:
        """x: [>= rows, k] bfloat16; out: [>= rows, out_features] bfloat16 or float32; rows: address of the number of
        rows to compute; scratch: room for x as int8, which all formats but bf16 need."""
        return [self._product(rows, x, out)]

    def columns(self, first: int, end: int) -> PackedWeight:
        """Outputs first..end - 1 alone, of a plain product, in the same memory; `first` is a multiple of PANEL."""
        panels = -(-self.n // PANEL)
        part = copy.copy(self)
        part.n = part.out_features = end - first
        part.packed = self.packed[first // PANEL * (self.packed.shape[0] // panels) :]
        part.bias = None if self.bias is None else self.bias[first:]
        return part

    def _product(self, rows: int, x: Array, out: Array) -> library.Gemm:
        return library.Gemm(
            rows=rows,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            format=self.format,
            weight=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            n=self.n,
            k=self.k,
            epilogue=STORE_FLOAT32 if DType.of(out.dtype) is DType.FLOAT32 else self.epilogue,
        )

    def __call__(self, x: torch.Tensor, dtype: AnyDType = DType.BFLOAT16) -> torch.Tensor:
        """x: [num_tokens, k] bfloat16. Returns [num_tokens, out_features] of `dtype`, bfloat16 or float32."""
        x = x.contiguous()
        rows = library.Int(x.shape[0])
        out = torch.empty(x.shape[0], self.out_features, dtype=DType.of(dtype).torch)
        scratch = QuantizedRows(x.shape[0], self.k)
        library.run(*self.operations(ctypes.addressof(rows), x, out, scratch))
        return out


class QuantizedRows:
    """Room for rows of x as int8 with their scales and sums, kept apart by how many values share a scale: threads that
    work on rows of their own may be at different products."""

    def __init__(self, capacity: int, width: int) -> None:
        self.values = allocate((capacity, width), np.int8)
        self.totals = allocate((capacity,), np.float32)
        self._capacity, self._width = capacity, width
        self._scales: dict[int, tuple[Buffer, Buffer]] = {}

    def scales_and_sums(self, block: int) -> tuple[Buffer, Buffer]:
        if block not in self._scales:
            count = self._capacity * (self._width // block)
            self._scales[block] = allocate((count,), np.float32), allocate((count,), np.int32)
        return self._scales[block]


class _QuantizedWeight(PackedWeight):
    """A weight whose x is quantised on the way in, with one scale to every `x_block` values."""

    x_block: int
    weight_scales: Buffer | None = None

    def columns(self, first: int, end: int) -> _QuantizedWeight:
        part = super().columns(first, end)
        assert isinstance(part, _QuantizedWeight)
        part.weight_scales = None if self.weight_scales is None else self.weight_scales[first:]
        return part

    def operations(
        self, rows: int, x: Array, out: Array, scratch: QuantizedRows | None = None
    ) -> list[library.Operation]:
        assert scratch is not None
        scales, sums = scratch.scales_and_sums(self.x_block)
        quantize = library.Quantize(
            rows=rows,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            out=scratch.values.data_ptr(),
            scales=scales.data_ptr(),
            sums=sums.data_ptr(),
            totals=scratch.totals.data_ptr(),
            k=self.k,
            block=self.x_block,
        )
        product = self._product(rows, x, out)
        product.x, product.x_stride = scratch.values.data_ptr(), self.k
        product.x_block = self.x_block
        product.x_scales, product.x_sums = scales.data_ptr(), sums.data_ptr()
        product.x_totals = scratch.totals.data_ptr()
        product.weight_scales = None if self.weight_scales is None else self.weight_scales.data_ptr()
        return [quantize, product]


class Int8Weight(_QuantizedWeight):
    """int8 weights with one scale to each output.

    x is quantised with one scale to every 64 or 32 values, whichever divides k (to a token where neither does): with
    one to a token, outliers in the inputs of attention, of the down projection and of the head cost some percent of
    perplexity.
    """

    format = INT8

    weight_scales: Buffer

    def __init__(self, weight: Rows, bias: Rows | None, epilogue: int = STORE, keep: Keep = keep_new) -> None:
        """weight: [n, k], of any floating type, k divisible by 16; quantised here."""
        self._set_up(weight.shape[0], weight.shape[1], weight.shape[1], epilogue)
        self.x_block = next((size for size in (64, 32) if self.k % size == 0), self.k)
        self.weight_scales = keep((-(-self.n // PANEL) * PANEL,), np.float32, lambda _: None)  # filled with the values
        self._keep(weight, bias, keep)

    def _values(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        values, scales = quantize_rows(rows.float())
        self.weight_scales[first : first + rows.shape[0]] = as_buffer(scales)
        return values

    @staticmethod
    def supports(dtype: AnyDType, out_features: int, in_features: int) -> bool:
        return PackedWeight.supports(dtype, out_features, in_features) and in_features % 16 == 0


class BlockWeight(_QuantizedWeight):
    """A GGUF matrix with the file's own bits and scales, in another order."""

    def __init__(
        self, kind: str, blocks: Rows, bias: Rows | None, epilogue: int = STORE, keep: Keep = keep_new
    ) -> None:
        """kind: a key of BLOCK_FORMATS; blocks: [n, bytes of a row] uint8, as they lie in the file."""
        block = BLOCK_FORMATS[kind]
        self.format, self.x_block = block.number, block.x_block
        n, row_bytes = blocks.shape
        num_blocks = row_bytes // block.file_bytes
        self._set_up(n, num_blocks * block.size, num_blocks * block.packed_bytes, epilogue)
        self._keep(blocks, bias, keep)

    @staticmethod
    def knows(kind: str | None) -> TypeGuard[str]:
        return kind in BLOCK_FORMATS

    def lookup(self, ids: torch.Tensor, dtype: AnyDType = DType.BFLOAT16, scale: float = 1.0) -> torch.Tensor:
        """ids: [count] int64. Returns those rows, dequantised, each value times `scale`: [count, k] of `dtype`."""
        rows, out = library.Int(ids.shape[0]), torch.empty(ids.shape[0], self.k, dtype=DType.of(dtype).torch)
        library.run(self.lookup_operation(ctypes.addressof(rows), ids, out, scale))
        return out

    def lookup_operation(self, rows: int, ids: Array | None, out: Array, scale: float) -> library.EmbedBlocks:
        """As `lookup`, into `out`, for as many rows as stand at the address `rows`."""
        return library.EmbedBlocks(
            rows=rows,
            ids=None if ids is None else ids.data_ptr(),
            format=self.format,
            table=self.packed.data_ptr(),
            out=out.data_ptr(),
            size=self.k,
            scale=scale,
            dtype=library.dtype_code(out.dtype),
        )


class MixedWeight(PackedWeight):
    """A plain product whose rows lie in blocks of several kinds: products of one x, side by side."""

    def __init__(
        self, kinds: Sequence[tuple[str, int]], blocks: Rows, bias: Rows | None, keep: Keep = keep_new
    ) -> None:
        """kinds: those of the rows in turn and how many rows each has, whole panels but for the last; blocks: rows, of
        as many bytes as their kind takes."""
        self.parts: list[PackedWeight] = []
        first = 0
        num_columns = blocks.shape[1] // BLOCK_FORMATS[kinds[0][0]].file_bytes * BLOCK_FORMATS[kinds[0][0]].size
        for kind, count in kinds:
            end, block = first + count, BLOCK_FORMATS[kind]
            rows = _SomeRows(blocks, first, (count, num_columns // block.size * block.file_bytes))
            part_bias = None if bias is None else _SomeRows(bias, first, (count,))
            self.parts.append(BlockWeight(kind, rows, part_bias, keep=keep))
            first = end
        self.k, self.n, self.out_features, self.epilogue = self.parts[0].k, first, first, STORE

    def operations(
        self, rows: int, x: Array, out: Array, scratch: QuantizedRows | None = None
    ) -> list[library.Operation]:
        operations: list[library.Operation] = []
        first = 0
        for part in self.parts:
            operations += part.operations(rows, x, out[:, first:], scratch)
            first += part.n
        return operations

    def columns(self, first: int, end: int) -> MixedWeight:
        chosen = copy.copy(self)
        chosen.n = chosen.out_features = end - first
        chosen.parts, start = [], 0
        for part in self.parts:
            own_first, own_end = max(first - start, 0), min(end - start, part.n)
            if own_first < own_end:
                chosen.parts.append(part.columns(own_first, own_end))
            start += part.n
        return chosen


class _SomeRows:
    """Rows of a matrix, or values of a vector, from `first` on: as many, and as wide, as `shape` says."""

    def __init__(self, rows: Rows, first: int, shape: Sequence[int]) -> None:
        self._rows, self._first, self.shape = rows, first, shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        first, end, _ = rows.indices(self.shape[0])
        return self._rows[self._first + first : self._first + end]


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows: [n, k] float32. Returns int8 values [n, k] and scales [n]: the largest magnitude of a row becomes 127."""
    largest = rows.abs().amax(dim=1)
    inverse = torch.where(largest > 0, 127 / largest, 0.0)
    return (rows * inverse[:, None]).round().to(torch.int8), largest / 127


def _ordered(rows: torch.Tensor, epilogue: int) -> torch.Tensor:
    """Rows as they are packed: where gated, 16 of the gate and 16 of the up projection in turn."""
    if epilogue in _GATED:
        rows = rows.view(2, -1, 16, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
    return rows.contiguous()
