"""Matrix products with weights packed for the native kernels: bf16, int8, and GGUF's own blocks."""

import copy
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch

from . import library, memory
from .header import NUMBERS

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
    n, width = weight.shape
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

    def __init__(self, weight: Rows, bias: torch.Tensor | None, epilogue: int = STORE) -> None:
        """weight: [n, k] bfloat16, bias: [n]; SILU_MUL, GELU_MUL: gate rows first, n divisible by 32."""
        self._set_up(weight.shape[0], weight.shape[1], 2 * weight.shape[1], bias, epilogue)
        for first, rows in slabs(weight, epilogue):
            self._pack(rows, first)

    def _set_up(self, n: int, k: int, row_bytes: int, bias: torch.Tensor | None, epilogue: int) -> None:
        self.n, self.k, self.epilogue = n, k, epilogue
        self.bias = None if bias is None else _padded(_ordered(bias, epilogue))
        self.out_features = n // 2 if epilogue in _GATED else n
        self._row_bytes = row_bytes
        self.packed = memory.allocate((-(-n // PANEL) * PANEL * row_bytes,), torch.uint8)
        library.run(library.Place(format=self.format, out=self.packed.data_ptr(), n=n, k=k))

    def _pack(self, rows: torch.Tensor, first: int) -> None:
        """Rows in packed order, which begin with row `first` of the whole, a multiple of PANEL."""
        address = self.packed.data_ptr() + first * self._row_bytes
        library.run(library.Pack(format=self.format, weight=rows.data_ptr(), out=address, n=rows.shape[0], k=self.k))

    @staticmethod
    def supports(dtype: torch.dtype, out_features: int, in_features: int) -> bool:
        return dtype == torch.bfloat16 and in_features % 2 == 0 and library.is_available()

    def operations(
        self, rows: int, x: torch.Tensor, out: torch.Tensor, scratch: "QuantizedRows | None" = None
    ) -> list[library.Operation]:
        """x: [>= rows, k] bfloat16; out: [>= rows, out_features] bfloat16 or float32; rows: address of the number of
        rows to compute; scratch: room for x as int8, which all formats but bf16 need."""
        return [self._product(rows, x, out)]

    def columns(self, first: int, end: int) -> "PackedWeight":
        """Outputs first..end - 1 alone, of a plain product, in the same memory; `first` is a multiple of PANEL."""
        panels = -(-self.n // PANEL)
        part = copy.copy(self)
        part.n = part.out_features = end - first
        part.packed = self.packed[first // PANEL * (self.packed.shape[0] // panels) :]
        part.bias = None if self.bias is None else self.bias[first:]
        return part

    def _product(self, rows: int, x: torch.Tensor, out: torch.Tensor) -> library.Gemm:
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
            epilogue=STORE_FLOAT32 if out.dtype == torch.float32 else self.epilogue,
        )

    def __call__(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """x: [num_tokens, k] bfloat16. Returns [num_tokens, out_features] of `dtype`, bfloat16 or float32."""
        x = x.contiguous()
        rows = library.Int(x.shape[0])
        out = torch.empty(x.shape[0], self.out_features, dtype=dtype)
        scratch = QuantizedRows(x.shape[0], self.k)
        library.run(*self.operations(ctypes.addressof(rows), x, out, scratch))
        return out


class QuantizedRows:
    """Room for rows of x as int8 with their scales and sums, kept apart by how many values share a scale: threads that
    work on rows of their own may be at different products."""

    def __init__(self, capacity: int, width: int) -> None:
        self.values = memory.allocate((capacity, width), torch.int8)
        self.totals = torch.empty(capacity)
        self._capacity, self._width = capacity, width
        self._scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def scales_and_sums(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        if block not in self._scales:
            count = self._capacity * (self._width // block)
            self._scales[block] = torch.empty(count), torch.empty(count, dtype=torch.int32)
        return self._scales[block]


class _QuantizedWeight(PackedWeight):
    """A weight whose x is quantised on the way in, with one scale to every `x_block` values."""

    x_block: int
    weight_scales: torch.Tensor | None = None

    def columns(self, first: int, end: int) -> "_QuantizedWeight":
        part = super().columns(first, end)
        assert isinstance(part, _QuantizedWeight)
        part.weight_scales = None if self.weight_scales is None else self.weight_scales[first:]
        return part

    def operations(
        self, rows: int, x: torch.Tensor, out: torch.Tensor, scratch: QuantizedRows | None = None
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

    def __init__(self, weight: Rows, bias: torch.Tensor | None, epilogue: int = STORE) -> None:
        """weight: [n, k], of any floating type, k divisible by 16; quantised here."""
        self._set_up(weight.shape[0], weight.shape[1], weight.shape[1], bias, epilogue)
        self.x_block = next((size for size in (64, 32) if self.k % size == 0), self.k)
        self.weight_scales = _padded(torch.zeros(self.n))
        for first, rows in slabs(weight, epilogue):
            values, self.weight_scales[first : first + rows.shape[0]] = quantize_rows(rows.float())
            self._pack(values, first)

    @staticmethod
    def supports(dtype: torch.dtype, out_features: int, in_features: int) -> bool:
        return PackedWeight.supports(dtype, out_features, in_features) and in_features % 16 == 0


class BlockWeight(_QuantizedWeight):
    """A GGUF matrix with the file's own bits and scales, in another order."""

    def __init__(self, kind: str, blocks: Rows, bias: torch.Tensor | None, epilogue: int = STORE) -> None:
        """kind: a key of BLOCK_FORMATS; blocks: [n, bytes of a row] uint8, as they lie in the file."""
        block = BLOCK_FORMATS[kind]
        self.format, self.x_block = block.number, block.x_block
        n, row_bytes = blocks.shape
        num_blocks = row_bytes // block.file_bytes
        self._set_up(n, num_blocks * block.size, num_blocks * block.packed_bytes, bias, epilogue)
        for first, rows in slabs(blocks, epilogue):
            self._pack(rows, first)

    @staticmethod
    def knows(kind: str | None) -> TypeGuard[str]:
        return kind in BLOCK_FORMATS

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        """ids: [count] int64. Returns those rows, dequantised, each value times `scale`: [count, k] of `dtype`."""
        rows, out = library.Int(ids.shape[0]), torch.empty(ids.shape[0], self.k, dtype=dtype)
        library.run(self.lookup_operation(ctypes.addressof(rows), ids, out, scale))
        return out

    def lookup_operation(
        self, rows: int, ids: torch.Tensor | None, out: torch.Tensor, scale: float
    ) -> library.EmbedBlocks:
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

    def __init__(self, kinds: Sequence[tuple[str, int]], blocks: Rows, bias: torch.Tensor | None) -> None:
        """kinds: those of the rows in turn and how many rows each has, whole panels but for the last; blocks: rows, of
        as many bytes as their kind takes."""
        self.parts: list[PackedWeight] = []
        first = 0
        for kind, count in kinds:
            end = first + count
            part = BlockWeight(kind, _SomeRows(blocks, first, end), None if bias is None else bias[first:end])
            self.parts.append(part)
            first = end
        self.k, self.n, self.out_features, self.epilogue = self.parts[0].k, first, first, STORE

    def operations(
        self, rows: int, x: torch.Tensor, out: torch.Tensor, scratch: QuantizedRows | None = None
    ) -> list[library.Operation]:
        operations: list[library.Operation] = []
        first = 0
        for part in self.parts:
            operations += part.operations(rows, x, out[:, first:], scratch)
            first += part.n
        return operations

    def columns(self, first: int, end: int) -> "MixedWeight":
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
    """Rows first..end - 1 of a matrix, all of one width."""

    def __init__(self, rows: Rows, first: int, end: int) -> None:
        self._rows, self._first = rows, first
        self.shape = end - first, rows[first : first + 1].shape[1]

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


def _padded(values: torch.Tensor) -> torch.Tensor:
    """values: [n]. Returns them as float32, zeros up to whole panels behind them."""
    padded = torch.zeros(-(-values.shape[0] // PANEL) * PANEL)
    padded[: values.shape[0]] = values
    return padded
