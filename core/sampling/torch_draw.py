"""The draw in torch: the reference for the native kernels, and what serves without them or on another device.

Sums are taken block by block in double precision, so a row's token depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..kernels.sampling import Allowed, DrawParams
from ..lazy_torch import torch
from . import ordering
from .ordering import BLOCK

_LARGEST = float(np.finfo(np.float32).max)

_LINES_AT_ONCE = 16
"""So many lines of logits are drawn from together: what is computed for them stays in the CPU's caches."""

_BATCHED_TOP_K = 256
"""Rows that keep at most this many tokens are handled together; others one by one."""

_NUCLEUS_FLOORS = (1e-2, 1e-3, 1e-4, 1e-5)
"""A nucleus seldom holds a token less likely than these beside the likeliest; they are tried before the safe bound."""


def draw(
    logits: torch.Tensor, params: DrawParams, processed: torch.Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """As `kernels.sampling.Draw` takes and returns them."""
    padded = ordering.pad_to_blocks(logits)
    best_ids, best = ordering.argmax(padded, ordering.block_max(padded))
    token_ids, largest = best_ids.cpu().numpy(), best.cpu().numpy()
    if processed is not None:
        processed.copy_(logits)
    lines = np.flatnonzero((params.temperature > 0.0) & np.isfinite(largest))
    for start in range(0, len(lines), _LINES_AT_ONCE):
        at = lines[start : start + _LINES_AT_ONCE]
        index = _index(at, logits)
        chosen, offset, heat = _take(padded, index), best[index, None], _column(params.temperature[at], logits).float()
        scaled = (chosen - offset).div_(heat)
        mask_below_min_p(scaled, params.min_p[at])
        top_k, top_p, uniforms = params.top_k[at], params.top_p[at], params.uniforms[at]
        drawn = _draw_lines(chosen, scaled, top_k, top_p, uniforms, processed is not None)
        token_ids[at] = drawn.token_ids.cpu().numpy()
        if processed is not None:
            _only_kept(scaled, drawn.kept).add_((offset / heat).clamp_(-_LARGEST, _LARGEST))
            processed[index] = scaled[:, : logits.shape[1]]
    return token_ids, largest


def masked(logits: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    """As `kernels.sampling.masked`: the reference of what the native draw does on its way."""
    bits = np.unpackbits(allowed.bitmask.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    copy = logits.clone()
    lines = torch.from_numpy(allowed.lines).to(logits.device)
    copy[lines] = copy[lines].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)
    return copy


def mask_below_min_p(scaled: torch.Tensor, min_p: np.ndarray) -> None:
    """In place. scaled: [rows, n] float32, each row's largest is 0; min_p: [rows] float64, 0: off."""
    for line in np.flatnonzero(min_p > 0.0).tolist():
        scaled[line].masked_fill_(scaled[line] < float(np.float32(np.log(min_p[line]))), float("-inf"))


@dataclass(slots=True)
class _Drawn:
    """token_ids: [rows] int64. `kept`: for each filtered row, when asked for, the ids that could have been drawn."""

    token_ids: torch.Tensor
    kept: dict[int, torch.Tensor] = field(default_factory=dict)


def _only_kept(scaled: torch.Tensor, kept: dict[int, torch.Tensor]) -> torch.Tensor:
    """Masks, in place, what a filtered row does not keep."""
    for line, ids in kept.items():
        values = scaled[line, ids]
        scaled[line].fill_(float("-inf"))
        scaled[line, ids] = values
    return scaled


def _draw_lines(
    logits: torch.Tensor,
    scaled: torch.Tensor,
    top_k: np.ndarray,
    top_p: np.ndarray,
    uniforms: np.ndarray,
    want_kept: bool,
) -> _Drawn:
    """scaled: [rows, blocks * BLOCK] float32, logits over temperature, shifted so that each row's largest is 0."""
    drawn = _Drawn(torch.empty(scaled.shape[0], dtype=torch.int64, device=scaled.device))
    limited = (top_k > 0) & (top_k < scaled.shape[1])
    batched = np.flatnonzero(limited & (top_k <= _BATCHED_TOP_K))
    groups = [batched] if batched.size else []
    groups += list(np.flatnonzero(limited & (top_k > _BATCHED_TOP_K)).reshape(-1, 1))
    for rows in groups:
        index = _index(rows, scaled)
        chosen = _take(logits, index)
        _, token_ids = ordering.top_k(chosen, ordering.block_max(chosen), int(top_k[rows].max()))
        values = _take(scaled, index).gather(1, token_ids).double()
        values[torch.arange(values.shape[1], device=values.device) >= _column(top_k[rows], values)] = float("-inf")
        _cut_to_nucleus(values, top_p[rows])
        _draw_from(drawn, rows, token_ids, values, uniforms[rows], want_kept)
    whole = np.flatnonzero(~limited)
    if whole.size:
        _draw_from_whole(drawn, logits, scaled, whole, top_p[whole], uniforms[whole], want_kept)
    return drawn


def _draw_from_whole(
    drawn: _Drawn,
    logits: torch.Tensor,
    scaled: torch.Tensor,
    rows: np.ndarray,
    top_p: np.ndarray,
    uniforms: np.ndarray,
    want_kept: bool,
) -> None:
    """Rows without top-k: weights of the whole vocabulary, summed block by block."""
    weights = _take(scaled, _index(rows, scaled)).exp()
    block_sums = weights.view(len(rows), -1, BLOCK).sum(-1).double().cumsum(1)
    plain = np.flatnonzero(top_p >= 1.0)
    if plain.size:
        drawn.token_ids[_index(rows[plain], scaled)] = _invert_in_blocks(
            _take(weights, _index(plain, weights)), block_sums[plain], uniforms[plain]
        )
    nucleus = np.flatnonzero(top_p < 1.0)
    if not nucleus.size:
        return
    maxima = ordering.block_max(weights).cpu().numpy()
    blocks = weights.view(len(rows), -1, BLOCK).cpu().numpy()
    totals = block_sums[:, -1].cpu().numpy()
    token_ids = np.empty(len(nucleus), dtype=np.int64)
    for at, i in enumerate(nucleus.tolist()):
        values = logits[int(rows[i])].cpu().numpy().reshape(-1, BLOCK)
        ids, kept_weights = _nucleus(values, blocks[i], maxima[i], top_p[i] * totals[i], totals[i])
        cumulative = kept_weights.cumsum(dtype=np.float64)
        place = cumulative.searchsorted(uniforms[i] * cumulative[-1], side="right")
        token_ids[at] = ids[min(place, len(ids) - 1)]
        if want_kept:
            drawn.kept[int(rows[i])] = torch.from_numpy(ids).to(weights.device)
    drawn.token_ids[_index(rows[nucleus], scaled)] = torch.from_numpy(token_ids).to(scaled.device)


def _invert_in_blocks(weights: torch.Tensor, cumulative: torch.Tensor, uniforms: np.ndarray) -> torch.Tensor:
    """weights: [rows, blocks * BLOCK] float32; cumulative: [rows, blocks] float64, their sums. Returns ids [rows]."""
    num_rows, num_blocks = cumulative.shape
    targets = _column(uniforms, cumulative) * cumulative[:, -1:]
    blocks = torch.searchsorted(cumulative, targets, right=True).clamp_(max=num_blocks - 1)
    before = torch.where(blocks > 0, cumulative.gather(1, (blocks - 1).clamp_(min=0)), 0.0)
    ids = blocks * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = _first_above(weights.gather(1, ids).double(), targets - before)
    return ids.gather(1, inside).squeeze(1)


def _first_above(weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The column of the first cumulative weight above the target, [rows, 1].

    weights: [rows, n] float64; targets: [rows, 1] float64. Where rounding put the target at or past the total, it is
    the last column with any weight.
    """
    columns = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, columns, 0).amax(1, keepdim=True)
    return torch.minimum(torch.searchsorted(weights.cumsum(1), targets, right=True), last)


def _cut_to_nucleus(values: torch.Tensor, top_p: np.ndarray) -> None:
    """Mask, in place, what lies behind the smallest prefix that holds top_p of all. values: [rows, n] float64, logits,
    largest first, the first is 0."""
    weights = values.exp()
    cumulative = weights.cumsum(1)
    beyond = cumulative - weights >= _column(top_p, weights) * cumulative[:, -1:]
    beyond &= _column(top_p < 1.0, weights)
    beyond[:, 0] = False
    values[beyond] = float("-inf")


def _nucleus(
    logits: np.ndarray, weights: np.ndarray, maxima: np.ndarray, wanted: float, total: float
) -> tuple[np.ndarray, np.ndarray]:
    """The smallest set that weighs `wanted`: its ids, ascending, [m] int64, and its weights, [m] float32.

    logits, weights: [blocks, BLOCK] float32, the largest weight is 1; maxima: [blocks], of weights. Entries below
    (total - wanted) / n cannot belong to the set, for all of them together weigh less than what may be missing. The
    candidates are binned by weight (a float's leading bits order like the float), so that only the bin at the nucleus'
    edge is sorted.
    """
    bound = 0.99 * (total - wanted) / weights.size
    for floor in (*(floor for floor in _NUCLEUS_FLOORS if floor > bound), bound):
        blocks = np.flatnonzero(maxima >= floor)
        near = weights[blocks].ravel()
        candidates = np.flatnonzero(near >= floor)
        values = near[candidates]
        if values.sum(dtype=np.float64) >= wanted:
            break
    bins = values.view(np.int32) >> 18
    bins = bins.max() - bins
    mass = np.bincount(bins, weights=values).cumsum()
    edge = min(int(mass.searchsorted(wanted)), len(mass) - 1)
    at_edge = np.flatnonzero(bins == edge)
    at_edge = at_edge[np.argsort(-logits[blocks].ravel()[candidates[at_edge]], kind="stable")]
    reached = values[at_edge].cumsum(dtype=np.float64) + (mass[edge - 1] if edge else 0.0)
    keep = bins < edge
    keep[at_edge[: int(reached.searchsorted(wanted)) + 1]] = True
    kept = candidates[keep]
    return blocks[kept // BLOCK] * BLOCK + kept % BLOCK, values[keep]


def _draw_from(
    drawn: _Drawn,
    rows: np.ndarray,
    token_ids: torch.Tensor,
    values: torch.Tensor,
    uniforms: np.ndarray,
    want_kept: bool,
) -> None:
    """token_ids: [len(rows), n], distinct in each row; values: [len(rows), n] float64, their logits, -inf: not kept."""
    ascending, order = token_ids.sort(1)
    values = values.gather(1, order)
    weights = values.exp()
    targets = _column(uniforms, weights) * weights.cumsum(1)[:, -1:]
    drawn.token_ids[_index(rows, weights)] = ascending.gather(1, _first_above(weights, targets)).squeeze(1)
    if want_kept:
        kept = values.isfinite()
        drawn.kept.update((int(row), ids[line]) for row, ids, line in zip(rows, ascending, kept, strict=True))


def _index(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(like.device)


def _take(rows_of: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows named, without a copy where they are all of them (they are named in ascending order)."""
    return rows_of if len(index) == rows_of.shape[0] else rows_of[index]


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device).unsqueeze(1)
