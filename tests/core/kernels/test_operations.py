"""Each native operation against torch, on every instruction set of this CPU."""

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from corespan.core.kernels import library
from corespan.core.kernels.linear import GELU_MUL, SILU_MUL, PackedWeight

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within two roundings of the result's type."""
    tolerance = 1e-5 if actual.dtype == expected.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def run_rms_norm(
    residual: torch.Tensor, weight: torch.Tensor, x: torch.Tensor | None = None, x_weight: torch.Tensor | None = None
) -> torch.Tensor:
    """x, of its own norm where there is a weight for it, is added to `residual` in place; returns the norm of that."""
    out = torch.empty_like(residual)
    rows = library.Int(residual.shape[0])
    library.run(
        library.RmsNorm(
            rows=ctypes.addressof(rows),
            x=None if x is None else x.data_ptr(),
            x_weight=None if x_weight is None else x_weight.data_ptr(),
            residual=residual.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            size=residual.shape[1],
            eps=1e-5,
            dtype=library.dtype_code(residual.dtype),
            wide_weights=weight.dtype != residual.dtype,
        )
    )
    return out


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    return (wide.to(weight.dtype) * weight).to(x.dtype)


WEIGHT_DTYPES = pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["float32", "bfloat16", "wide_weight"],
)


@WEIGHT_DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (3, 576), (130, 80)])
def test_rms_norm_equals_torch(shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype, isa: str) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=weight_dtype, seed=1)
    assert_close(run_rms_norm(x, weight), normalised(x, weight))


@WEIGHT_DTYPES
@pytest.mark.parametrize("norm_first", [False, True])
def test_what_is_normalised_is_the_sum_which_stays_in_the_residual(
    norm_first: bool, dtype: torch.dtype, weight_dtype: torch.dtype, isa: str
) -> None:
    x, residual = random(5, 64, dtype=dtype), random(5, 64, dtype=dtype, seed=1)
    weight, x_weight = random(64, dtype=weight_dtype, seed=2), random(64, dtype=weight_dtype, seed=3)
    summed = residual + (normalised(x, x_weight) if norm_first else x)
    found = run_rms_norm(residual, weight, x, x_weight if norm_first else None)
    if norm_first:
        assert_close(residual, summed)
    else:
        assert torch.equal(residual, summed)
    assert_close(found, normalised(residual, weight))


ACTIVATIONS = pytest.mark.parametrize(
    ("epilogue", "activation"),
    [(SILU_MUL, F.silu), (GELU_MUL, lambda x: F.gelu(x, approximate="tanh"))],
    ids=["silu", "gelu"],
)


@ACTIVATIONS
def test_activations_of_the_largest_and_of_no_numbers_equal_torch(
    epilogue: int, activation: Callable[[torch.Tensor], torch.Tensor], isa: str
) -> None:
    gate = torch.tensor([0, 1e-30, 3, -3, 87, -87, 90, -90, 1000, -1000, 3e38, torch.inf, torch.nan, 1, -1, 5])
    x = torch.zeros(16, 16).fill_diagonal_(1).bfloat16()
    weight = torch.cat((torch.where(gate.isfinite(), gate, 0).diag(), torch.ones(16, 16))).bfloat16()
    offset = torch.cat((torch.where(gate.isfinite(), 0, gate), torch.zeros(16))).bfloat16()
    found = PackedWeight(weight, offset, epilogue)(x).diagonal()
    torch.testing.assert_close(found, activation(gate.bfloat16()), atol=1e-6, rtol=2**-7, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 14, 15, 29, 64, 300])
@pytest.mark.parametrize(("n", "k"), [(32, 16), (33, 2), (100, 130), (576, 1536)])
def test_products_with_packed_weights_equal_torch(rows: int, n: int, k: int, isa: str) -> None:
    x, weight = random(rows, k), random(n, k, seed=1) / k**0.5
    packed = PackedWeight(weight, None)
    expected = F.linear(x.float(), weight.float())
    torch.testing.assert_close(packed(x, torch.float32), expected, atol=1e-4, rtol=1e-4)
    assert_close(packed(x), expected)


def test_a_bias_is_added_before_rounding(isa: str) -> None:
    x, weight, bias = random(3, 64), random(50, 64, seed=1) / 8, random(50, seed=2)
    assert_close(PackedWeight(weight, bias)(x), F.linear(x.float(), weight.float(), bias.float()))


@ACTIVATIONS
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_product_equals_that_of_the_plain_one_s_halves(
    bias: bool, epilogue: int, activation: Callable[[torch.Tensor], torch.Tensor], isa: str
) -> None:
    x, weight = 2 * random(9, 64), random(96, 64, seed=1) / 8
    offset = random(96, seed=2) if bias else None
    gate, up = PackedWeight(weight, offset)(x).chunk(2, dim=-1)
    assert_close(PackedWeight(weight, offset, epilogue)(x), activation(gate) * up)


@pytest.mark.parametrize(("first", "end"), [(0, 40), (32, 100)])
def test_some_columns_alone_are_the_same_bits_as_among_all(first: int, end: int, isa: str) -> None:
    x, packed = random(9, 64), PackedWeight(random(100, 64, seed=1), random(100, seed=2))
    assert torch.equal(packed.columns(first, end)(x), packed(x)[:, first:end])


def test_a_row_is_bitwise_the_same_whatever_rows_are_beside_it(isa: str) -> None:
    x, packed = random(100, 576), PackedWeight(random(320, 576, seed=1), None)
    whole = packed(x, torch.float32)
    for rows in (1, 3, 14, 15, 40):
        assert torch.equal(packed(x[:rows], torch.float32), whole[:rows])


@pytest.mark.parametrize("rows", [1, 4, 5, 37])
@pytest.mark.parametrize("n", [32, 200, 1000])
def test_the_number_of_threads_does_not_change_a_bit(rows: int, n: int, threads: int) -> None:
    x, packed = random(rows, 128), PackedWeight(random(n, 128, seed=1), None)
    result = packed(x)
    torch.set_num_threads(1)
    assert torch.equal(result, packed(x))


def test_an_unknown_instruction_set_is_refused_with_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORESPAN_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="sse9.*portable"):
        library.isa_level()


def test_none_turns_the_native_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORESPAN_CPU_ISA", "none")
    assert not library.is_available()
    assert not PackedWeight.supports(torch.bfloat16, 64, 64)


FAULTS = """
import mmap, os, torch
from corespan.core.kernels import library, linear

def faults():
    stats = {thread: open(f"/proc/self/task/{thread}/stat").read() for thread in os.listdir("/proc/self/task")}
    return {thread: int(stat.rpartition(")")[2].split()[7]) for thread, stat in stats.items()}

torch.set_num_threads(2)
linear.PackedWeight(torch.ones(32, 64).bfloat16(), None)  # both threads are there from now on
rows, columns = 24 * 32, 1024
fresh = mmap.mmap(-1, rows * columns * 2)
fresh.madvise(mmap.MADV_NOHUGEPAGE)
out = torch.frombuffer(fresh, dtype=torch.uint8).data_ptr()
place = library.Recording([library.Place(format=linear.BF16, out=out, n=rows, k=columns)])
before = faults()
place.run()
after = faults()
print(*sorted(after[thread] - before[thread] for thread in before)[-2:])
"""


def test_each_thread_is_the_first_to_touch_the_panels_that_it_reads_first() -> None:
    """Of 24 panels of 16 pages two threads own ten each, and the pages of the last four in turn."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for taken in map(int, done.stdout.split()):
        assert 12 * 16 <= taken < 13 * 16
