"""The block formats of GGUF tensors and how each becomes float32. `gguf.py` calls `dequantize`; exact to the bit with
the `gguf` package, in torch so that every core takes part."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..lazy_torch import torch

_SUPER_BLOCK = 256
_PIECE = 24576  # elements decoded at once, below the 32768 from which torch starts its threads
_PIECES_A_TASK = 8


def dequantize(
    blocks: torch.Tensor, quant_type: QuantType, dtype: torch.dtype, pool: ThreadPoolExecutor
) -> torch.Tensor:
    """blocks: [num_blocks, quant_type.block_bytes] uint8. Returns [num_blocks, quant_type.block_size] of `dtype`.

    Works in pieces, spread over the pool's threads. A piece is small enough that its temporaries stay in the cache and
    that torch does not split its operations: thousands of parallel regions would crawl on a busy machine.
    """
    if quant_type.block_size == 1:
        return quant_type.decode(blocks).to(dtype)
    values = torch.empty(blocks.shape[0], quant_type.block_size, dtype=dtype)
    step = _PIECE // quant_type.block_size

    @torch.inference_mode()
    def decode(start: int) -> None:
        for at in range(start, min(start + _PIECES_A_TASK * step, blocks.shape[0]), step):
            values[at : at + step] = quant_type.decode(blocks[at : at + step])

    for _ in pool.map(decode, range(0, blocks.shape[0], _PIECES_A_TASK * step)):
        pass
    return values


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 number at byte `start` of each block: [num_blocks, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes to [..., 2, n]: the low halves, then the high halves."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-2)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The 32 bits at byte `start`, lowest first, each worth 16: [num_blocks, 2, 16] uint8."""
    bits = blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).view(-1, 2, 16)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    quants = _nibbles(blocks[:, 2:]).flatten(1).float().sub_(8)
    return quants.mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    quants = _nibbles(blocks[:, 4:]).flatten(1).float()
    return quants.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    quants = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).flatten(1).float().sub_(16)
    return quants.mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    quants = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).flatten(1).float()
    return quants.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit scales and minima of a Q4_K or Q5_K block, times their float16 units: [num_blocks, 8, 1] each."""
    scale, minimum, mixed = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((scale & 0x3F, (mixed & 0x0F) | ((scale >> 2) & 0x30)), dim=1).float()
    minima = torch.cat((minimum & 0x3F, (mixed >> 4) | ((minimum >> 2) & 0x30)), dim=1).float()
    return scales.mul_(_half(blocks, 0)).unsqueeze(2), minima.mul_(_half(blocks, 2)).unsqueeze(2)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _k_scales(blocks)
    quants = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32).float()
    return quants.mul_(scales).sub_(minima).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return (low | (high << 4)).float().mul_(scales).sub_(minima).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208)).unsqueeze(2)
    quants = (low | (high.view(-1, 8, 32) << 4)).float().sub_(32).view(-1, 16, 16)
    return quants.mul_(scales).flatten(1)


def _plain(dtype: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.view(getattr(torch, dtype))


@dataclass(slots=True, frozen=True)
class QuantType:
    """A tensor format: `block_size` elements take `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]


QUANT_TYPES: dict[int, QuantType] = {
    0: QuantType("F32", 1, 4, _plain("float32")),
    1: QuantType("F16", 1, 2, _plain("float16")),
    2: QuantType("Q4_0", 32, 18, _q4_0),
    3: QuantType("Q4_1", 32, 20, _q4_1),
    6: QuantType("Q5_0", 32, 22, _q5_0),
    7: QuantType("Q5_1", 32, 24, _q5_1),
    8: QuantType("Q8_0", 32, 34, _q8_0),
    12: QuantType("Q4_K", _SUPER_BLOCK, 144, _q4_k),
    13: QuantType("Q5_K", _SUPER_BLOCK, 176, _q5_k),
    14: QuantType("Q6_K", _SUPER_BLOCK, 210, _q6_k),
    30: QuantType("BF16", 1, 2, _plain("bfloat16")),
}
"""By the number that stands in the file."""
