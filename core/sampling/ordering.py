"""Largest entries of rows of logits, by value and then by lower token id. Called by the draw and by logprobs.

The order is total, so the answer never depends on the batch, on k or on an algorithm's treatment of ties. Rows are
looked at in blocks of 64: one vectorised pass finds each block's maximum, and then only k blocks matter, since each of
the k largest entries lies in one of the k blocks with the largest maxima.
"""

from __future__ import annotations

from ..lazy_torch import torch

BLOCK = 64


def pad_to_blocks(logits: torch.Tensor) -> torch.Tensor:
    """logits: [rows, vocab] float32. Widened with -inf to a multiple of BLOCK; unchanged if it is one already."""
    missing = -logits.shape[1] % BLOCK
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits.contiguous()


def block_max(logits: torch.Tensor) -> torch.Tensor:
    """logits: [rows, blocks * BLOCK]. Returns [rows, blocks]; NaN where a block holds a NaN."""
    return logits.view(logits.shape[0], -1, BLOCK).amax(-1)


def argmax(logits: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first largest entry of each row: its id, [rows] int64, and its value, [rows]. `maxima` is `block_max`."""
    blocks = maxima.argmax(1)
    rows = torch.arange(logits.shape[0], device=logits.device)
    inside = logits.view(logits.shape[0], -1, BLOCK)[rows, blocks].argmax(1)
    token_ids = blocks * BLOCK + inside
    return token_ids, logits[rows, token_ids]


def top_k(logits: torch.Tensor, maxima: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest entries of each row, largest first: values [rows, k] float32 and ids [rows, k] int64."""
    num_rows, width = logits.shape
    if k * BLOCK * 2 < width:
        block_ids = torch.arange(maxima.shape[1], device=logits.device)
        blocks = _ids_of(torch.topk(_keys(maxima, block_ids), k, dim=1).values)
        candidate_ids = (blocks.unsqueeze(2) * BLOCK + torch.arange(BLOCK, device=logits.device)).view(num_rows, -1)
        keys = _keys(logits.gather(1, candidate_ids), candidate_ids)
    else:
        keys = _keys(logits, torch.arange(width, device=logits.device))
    token_ids = _ids_of(torch.topk(keys, k, dim=1).values)
    return logits.gather(1, token_ids), token_ids


def _keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that order (value descending, id ascending) when sorted descending."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: one zero, not two
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered << 32) | (0xFFFFFFFF - ids)


def _ids_of(keys: torch.Tensor) -> torch.Tensor:
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)
