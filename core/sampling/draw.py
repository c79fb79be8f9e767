"""The draw: one token per row from scaled logits, after top-k and top-p, by inverse CDF. Called by `Sampler`.

The kept tokens stand in the order of their ids, and the token drawn is the first whose cumulative weight exceeds
u * total. Every step works on single rows in a fixed order, so a row's token depends on that row alone. Top-k keeps
exactly k tokens and top-p the smallest set that reaches p, both by value and then by lower id.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from . import ordering
from .ordering import BLOCK

_BATCHED_TOP_K = 256
"""Rows that keep at most this many tokens are handled together; others one by one."""

_NUCLEUS_FLOORS = (1e-2, 1e-3, 1e-4, 1e-5)
"""A nucleus seldom holds a token less likely than these beside the likeliest; they are tried before the safe bound."""


@dataclass(slots=True)
class Drawn:
    """token_ids: [rows] int64. `kept`: for each filtered row, when asked for, the ids that could have been drawn."""

    token_ids: torch.Tensor
    kept: dict[int, torch.Tensor] = field(default_factory=dict)


def draw(
    scaled: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, uniforms: np.ndarray, want_kept: bool = False
) -> Drawn:
    """scaled: [rows, blocks * BLOCK] float32, logits over temperature, shifted so that each row's largest is 0.

    top_k: [rows] int64, 0: off; top_p: [rows] float64; uniforms: [rows] float64 in [0, 1).
    """
    drawn = Drawn(torch.empty(scaled.shape[0], dtype=torch.int64, device=scaled.device))
    limited = (top_k > 0) & (top_k < scaled.shape[1])
    batched = np.flatnonzero(limited & (top_k <= _BATCHED_TOP_K))
    groups = [batched] if batched.size else []
    groups += list(np.flatnonzero(limited & (top_k > _BATCHED_TOP_K)).reshape(-1, 1))
    for rows in groups:
        chosen = _take(scaled, _index(rows, scaled))
        values, token_ids = ordering.top_k(chosen, ordering.block_max(chosen), int(top_k[rows].max()))
        weights = values.double().exp_()
        weights[torch.arange(weights.shape[1]) >= _column(top_k[rows], weights)] = 0.0
        _cut_to_nucleus(weights, top_p[rows])
        _draw_from(drawn, rows, token_ids, weights, uniforms[rows], want_kept)
    whole = np.flatnonzero(~limited)
    if whole.size:
        _draw_from_whole(drawn, scaled, whole, top_p[whole], uniforms[whole], want_kept)
    return drawn


def _draw_from_whole(
    drawn: Drawn,
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
        ids, kept_weights = _nucleus(blocks[i], maxima[i], top_p[i] * totals[i], totals[i])
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


def _cut_to_nucleus(weights: torch.Tensor, top_p: np.ndarray) -> None:
    """Zero, in place, what lies behind the smallest prefix that holds top_p of all. weights: [rows, n] float64, largest
    first."""
    cumulative = weights.cumsum(1)
    beyond = cumulative - weights >= _column(top_p, weights) * cumulative[:, -1:]
    beyond &= _column(top_p < 1.0, weights)
    beyond[:, 0] = False
    weights[beyond] = 0.0


def _nucleus(weights: np.ndarray, maxima: np.ndarray, wanted: float, total: float) -> tuple[np.ndarray, np.ndarray]:
    """The smallest set that weighs `wanted`: its ids, ascending, [m] int64, and its weights, [m] float32.

    weights: [blocks, BLOCK] float32, the largest is 1; maxima: [blocks]. Entries below (total - wanted) / n cannot
    belong to the set, for all of them together weigh less than what may be missing. The candidates are binned by size
    (a float's leading bits order like the float), so that only the bin at the nucleus' edge is sorted.
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
    at_edge = np.sort(values[bins == edge])[::-1]
    reached = at_edge.cumsum(dtype=np.float64) + (mass[edge - 1] if edge else 0.0)
    size = min(int(reached.searchsorted(wanted)), len(at_edge) - 1) + 1
    smallest = at_edge[size - 1]
    ties = size - int(np.count_nonzero(at_edge > smallest))
    keep = values > smallest
    keep[np.flatnonzero(values == smallest)[:ties]] = True
    kept = candidates[keep]
    return blocks[kept // BLOCK] * BLOCK + kept % BLOCK, values[keep]


def _draw_from(
    drawn: Drawn,
    rows: np.ndarray,
    token_ids: torch.Tensor,
    weights: torch.Tensor,
    uniforms: np.ndarray,
    want_kept: bool,
) -> None:
    """token_ids: [len(rows), n], distinct in each row; weights: [len(rows), n] float64, 0: not kept."""
    ascending, order = token_ids.sort(1)
    weights = weights.gather(1, order)
    targets = _column(uniforms, weights) * weights.cumsum(1)[:, -1:]
    drawn.token_ids[_index(rows, weights)] = ascending.gather(1, _first_above(weights, targets)).squeeze(1)
    if want_kept:
        drawn.kept.update((int(row), ids[kept > 0]) for row, ids, kept in zip(rows, ascending, weights, strict=True))


def _index(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(like.device)


def _take(rows_of: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows named, without a copy where they are all of them (they are named in ascending order)."""
    return rows_of if len(index) == rows_of.shape[0] else rows_of[index]


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device).unsqueeze(1)
