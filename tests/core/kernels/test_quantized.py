"""Products with int8 and GGUF block weights against the same arithmetic in torch."""

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch

from corespan.core.kernels.linear import (
    BLOCK_FORMATS,
    SILU_MUL,
    STORE,
    BlockWeight,
    Int8Weight,
    MixedWeight,
    PackedWeight,
    quantize_rows,
)
from corespan.core.models import ops as torch_ops
from corespan.core.models.gguf_quants import QUANT_TYPES, dequantize

ROWS = pytest.mark.parametrize("rows", [1, 2, 7, 15, 40])
KINDS = pytest.mark.parametrize("kind", BLOCK_FORMATS)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def whole_numbers(rows: int, k: int) -> torch.Tensor:
    """[rows, k] bfloat16, its own quantisation, with no tie to round either way."""
    x = torch.randint(-127, 128, (rows, k), generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, ::16] = 127
    return x


def as_quantized(x: torch.Tensor, block: int) -> torch.Tensor:
    """x as it reads back from int8 with one scale to every `block` values."""
    values, scales = quantize_rows(x.float().view(-1, block))
    return (values * scales[:, None]).view(x.shape)


def random_blocks(kind: str, n: int, k: int) -> torch.Tensor:
    """[n, row bytes] uint8 with random values and scales of ordinary size."""
    generator = torch.Generator().manual_seed(3)
    block = BLOCK_FORMATS[kind]
    blocks = torch.randint(0, 256, (n * k // block.size, block.file_bytes), generator=generator, dtype=torch.uint8)
    count = 2 if kind.endswith(("_1", "4_K", "5_K")) else 1
    first = 208 if kind == "Q6_K" else 0
    scales = torch.randn(blocks.shape[0], count, generator=generator).mul_(0.1).half()
    scales[0] = 2.0**-20  # a subnormal
    blocks[:, first : first + 2 * count] = scales.view(torch.uint8)
    return blocks.view(n, -1)


def whole_blocks(kind: str, k: int) -> int:
    """The least width from k on that is made of whole blocks."""
    size = 1 if kind not in BLOCK_FORMATS else BLOCK_FORMATS[kind].size
    return -(-k // size) * size


def dequantized(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    quant_type = next(known for known in QUANT_TYPES.values() if known.name == kind)
    with ThreadPoolExecutor(1) as pool:
        flat = blocks.view(-1, quant_type.block_bytes)
        return dequantize(flat, quant_type, torch.float32, pool).view(blocks.shape[0], -1)


@ROWS
@pytest.mark.parametrize(("n", "k"), [(32, 16), (33, 48), (200, 576)])
def test_int8_products_equal_torch(rows: int, n: int, k: int, isa: str) -> None:
    weight = random(n, k, seed=1) / k**0.5
    x = whole_numbers(rows, k)
    values, scales = quantize_rows(weight.float())
    expected = x.float() @ (values * scales[:, None]).T
    torch.testing.assert_close(Int8Weight(weight, None)(x, torch.float32), expected, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("kind", ["int8", *BLOCK_FORMATS])
@pytest.mark.parametrize(("first", "end"), [(0, 40), (32, 70)])
def test_some_columns_alone_are_the_same_bits_as_among_all(kind: str, first: int, end: int, isa: str) -> None:
    k = whole_blocks(kind, 64)
    x, bias = random(9, k), random(70, seed=2)
    if kind == "int8":
        packed: PackedWeight = Int8Weight(random(70, 64, seed=1), bias)
    else:
        packed = BlockWeight(kind, random_blocks(kind, 70, k), bias)
    assert torch.equal(packed.columns(first, end)(x), packed(x)[:, first:end])


@ROWS
@KINDS
@pytest.mark.parametrize(("n", "k"), [(32, 32), (70, 96)])
def test_block_products_equal_torch(kind: str, rows: int, n: int, k: int, isa: str) -> None:
    k = whole_blocks(kind, k)
    x, blocks = whole_numbers(rows, k), random_blocks(kind, n, k)
    expected = x.float() @ dequantized(kind, blocks).T
    scale = float(expected.abs().max())
    actual = BlockWeight(kind, blocks, None)(x, torch.float32)
    torch.testing.assert_close(actual, expected, atol=2e-3 * scale, rtol=2e-3)


@KINDS
def test_rows_looked_up_are_those_of_the_gguf_package_to_the_bit(kind: str, isa: str) -> None:
    n, k = 70, 512
    blocks = random_blocks(kind, n, k)
    if kind == "Q6_K":
        extreme = blocks.view(-1, 210)[:, 208:]
    else:
        extreme = blocks.view(-1, BLOCK_FORMATS[kind].file_bytes)[:, :2]
    values = torch.tensor([0.0, -0.0, 2.0**-24, 60.0, -60.0, 200.0]).half()
    extreme[1:7] = values.view(-1, 1).view(torch.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))
    ids = torch.tensor([69, 0, 1, 31, 32, 40, 16, 0])

    weight = BlockWeight(kind, blocks, None)

    assert torch.equal(weight.lookup(ids, torch.float32), expected[ids])
    assert torch.equal(weight.lookup(ids, scale=3.0), expected[ids].bfloat16() * 3)


@KINDS
def test_a_block_product_stays_close_to_that_of_the_dequantised_weight(kind: str, isa: str) -> None:
    """Only x is rounded, to 8 bits in blocks: the error is below 1% of the result's spread."""
    x, blocks = random(20, 512), random_blocks(kind, 64, 512)
    expected = x.float() @ dequantized(kind, blocks).T
    error = BlockWeight(kind, blocks, None)(x, torch.float32) - expected
    assert error.square().mean().sqrt() < 0.01 * expected.std()


def test_parts_of_different_formats_are_the_products_of_each_side_by_side(isa: str) -> None:
    x, bias, kinds = random(9, 256), random(136, seed=2), [("Q4_K", 64), ("Q6_K", 32), ("Q5_0", 40)]
    rows = [row for kind, count in kinds for row in random_blocks(kind, count, 256)]
    parts = [
        BlockWeight(kind, torch.stack(rows[first : first + count]), bias[first : first + count])(x)
        for (kind, count), first in zip(kinds, (0, 64, 96), strict=True)
    ]
    whole = torch.cat(parts, dim=1)

    mixed = MixedWeight(kinds, RowsOfSeveralWidths(rows), bias)

    assert torch.equal(mixed(x), whole)
    assert torch.equal(mixed.columns(0, 70)(x), whole[:, :70])
    assert torch.equal(mixed.columns(32, 136)(x), whole[:, 32:])


class RowsOfSeveralWidths:
    """Slices may be had of rows that are of one."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.shape = len(rows), len(rows[0])
        self._rows = rows

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return torch.stack(self._rows[rows])


def test_int8_stays_close_to_the_product_it_stands_for(isa: str) -> None:
    x, weight = random(20, 576), random(64, 576, seed=1) / 24
    expected = x.float() @ weight.float().T
    error = Int8Weight(weight, None)(x, torch.float32) - expected
    assert error.square().mean().sqrt() < 0.02 * expected.std()


def test_extreme_values_do_not_overflow(isa: str) -> None:
    x = torch.full((3, 1024), 3.0).bfloat16()
    weight = torch.full((40, 1024), -2.0).bfloat16()
    torch.testing.assert_close(Int8Weight(weight, None)(x, torch.float32), torch.full((3, 40), -6144.0))


def test_a_row_of_zeros_gives_the_bias(isa: str) -> None:
    bias = random(40, seed=2)
    product = Int8Weight(random(40, 64), bias)(torch.zeros(2, 64).bfloat16())
    assert torch.equal(product, bias.expand(2, 40))


def test_gated_int8_products_equal_silu_and_mul_of_the_plain_ones(isa: str) -> None:
    x, weight = random(9, 64), random(96, 64, seed=1) / 8
    values, scales = quantize_rows(weight.float())
    plain = (as_quantized(x, 32) @ (values * scales[:, None]).T).bfloat16()
    torch.testing.assert_close(Int8Weight(weight, None, SILU_MUL)(x), torch_ops.gated(plain), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["int8", *BLOCK_FORMATS])
def test_a_quantised_row_is_bitwise_the_same_whatever_rows_are_beside_it(kind: str, isa: str) -> None:
    k = whole_blocks(kind, 96)
    x = random(40, k)
    packed: PackedWeight
    if kind == "int8":
        packed = Int8Weight(random(64, 96, seed=1), None)
    else:
        packed = BlockWeight(kind, random_blocks(kind, 64, k), None)
    whole = packed(x, torch.float32)
    for rows in (1, 3, 14, 15):
        assert torch.equal(packed(x[:rows], torch.float32), whole[:rows])


class Slices:
    """A matrix that is only ever asked for slices of its rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.shape = rows.shape
        self._rows = rows

    def __getitem__(self, rows: slice) -> torch.Tensor:
        assert rows.stop - rows.start <= 32
        return self._rows[rows]


@pytest.mark.parametrize("epilogue", [STORE, SILU_MUL])
@pytest.mark.parametrize("kind", ["bf16", "int8", *BLOCK_FORMATS])
def test_a_weight_packed_in_slabs_of_rows_is_the_one_packed_as_a_whole(
    kind: str, epilogue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 96 if epilogue == SILU_MUL else 70

    def pack(slices: bool) -> PackedWeight:
        rows = random(n, 64) if kind in ("bf16", "int8") else random_blocks(kind, n, whole_blocks(kind, 64))
        weight = Slices(rows) if slices else rows
        if kind in ("bf16", "int8"):
            return (PackedWeight if kind == "bf16" else Int8Weight)(weight, None, epilogue)
        return BlockWeight(kind, weight, None, epilogue)

    whole = pack(slices=False)
    monkeypatch.setattr("corespan.core.kernels.linear.SLAB_VALUES", 1)
    in_slabs = pack(slices=True)

    assert np.array_equal(in_slabs.packed, whole.packed)
    if isinstance(whole, Int8Weight) and isinstance(in_slabs, Int8Weight):
        assert np.array_equal(in_slabs.weight_scales, whole.weight_scales)
