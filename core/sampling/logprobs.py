"""Logprobs of given tokens and of the k likeliest ones, out of logits.

Called by `Sampler` for the tokens it drew and by the model runner for prompt tokens.
"""

from __future__ import annotations

import numpy as np

from ...protocol.outputs import LogprobsArrays
from ..kernels import sampling as native
from ..kernels.memory import Array, as_tensor
from ..kernels.sampling import Allowed
from ..lazy_torch import torch
from . import ordering
from .draw import masked
from .ordering import BLOCK

_LINES_AT_ONCE = 16
"""So many lines of logits are exponentiated together: they stay in the CPU's caches."""

_BATCHED_K = 256
"""Up to this k all rows are handled together; beyond it one by one, which bounds the memory of sorting."""


def gather_logprobs(
    logits: Array,
    token_ids: np.ndarray,
    k: int,
    *,
    as_logits: bool = False,
    more_token_ids: np.ndarray | None = None,
) -> LogprobsArrays:
    """Log-softmax values of `token_ids` ([n]) and, behind them, of the k largest entries of each row of logits.

    logits: [n, vocab] float32; k = -1: the whole vocabulary. `as_logits`: report logits as they are.
    `more_token_ids`: [n, m], reported in place of the k largest. A rank counts the entries not below the token's own.
    """
    vocab_size = logits.shape[1]
    if more_token_ids is not None:
        k = more_token_ids.shape[1]
    elif k == -1:
        k = vocab_size
    asked = np.asarray(token_ids), min(k, vocab_size), more_token_ids, as_logits
    if native.supports(logits):
        return LogprobsArrays(*native.logprobs(logits, *asked))
    return LogprobsArrays(*torch_logprobs(as_tensor(logits), *asked))


def gather_allowed_logprobs(
    logits: Array, token_ids: np.ndarray, k: int, allowed: Allowed, *, as_logits: bool = False
) -> LogprobsArrays:
    """As `gather_logprobs`, but the k are the largest of the tokens that a line may have, at the values they have among
    all tokens; -inf fills up a line that may have fewer."""
    left = gather_logprobs(masked(logits, allowed), token_ids, k, as_logits=True)
    result = gather_logprobs(logits, token_ids, k, as_logits=as_logits, more_token_ids=left.token_ids[:, 1:])
    result.logprobs[np.isneginf(left.logprobs)] = -np.inf
    return result


def torch_logprobs(
    logits: torch.Tensor, token_ids: np.ndarray, k: int, more_token_ids: np.ndarray | None, as_logits: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `kernels.sampling.logprobs`: the reference, and what serves without the kernels or on another device."""
    chosen = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    padded = ordering.pad_to_blocks(logits)
    maxima = ordering.block_max(padded)
    own = padded.gather(1, chosen.unsqueeze(1))
    if more_token_ids is not None:
        ids = torch.as_tensor(more_token_ids, dtype=torch.int64, device=logits.device)
        values = padded.gather(1, ids)
    else:
        values, ids = _largest(padded, maxima, k)
    values = torch.cat([own, values], 1)
    if not as_logits:
        values -= _log_sum_exp(padded, maxima).unsqueeze(1)
    ranks = _ranks(padded, maxima, own).clamp_(max=logits.shape[1])
    return (
        torch.cat([chosen.unsqueeze(1), ids], 1).to(torch.int32).cpu().numpy(),
        values.cpu().numpy(),
        ranks.to(torch.int32).cpu().numpy(),
    )


def _largest(padded: torch.Tensor, maxima: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    if k == 0:
        empty = padded.new_empty(padded.shape[0], 0)
        return empty, empty.to(torch.int64)
    if k <= _BATCHED_K:
        return ordering.top_k(padded, maxima, k)
    rows = [ordering.top_k(padded[i : i + 1], maxima[i : i + 1], k) for i in range(padded.shape[0])]
    return torch.cat([values for values, _ in rows]), torch.cat([ids for _, ids in rows])


def _log_sum_exp(padded: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """[n] float32; summed block by block, so that a row's sum does not depend on the batch."""
    largest = maxima.amax(1, keepdim=True)
    sums = torch.empty_like(maxima)
    for start in range(0, len(padded), _LINES_AT_ONCE):
        lines = slice(start, start + _LINES_AT_ONCE)
        weights = (padded[lines] - largest[lines]).exp_()
        sums[lines] = weights.view(len(weights), -1, BLOCK).sum(-1)
    return (largest.squeeze(1).double() + sums.double().cumsum(1)[:, -1].log()).float()


def _ranks(padded: torch.Tensor, maxima: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[n] int64. Looks only at the blocks that hold an entry not below the row's own."""
    rows, blocks = torch.nonzero(maxima >= own, as_tuple=True)
    entries = padded.view(padded.shape[0], -1, BLOCK)[rows, blocks]
    above = (entries >= own[rows]).sum(1)
    return torch.zeros(padded.shape[0], dtype=torch.int64, device=padded.device).index_add_(0, rows, above)


def merge_rows(parts: list[tuple[np.ndarray, LogprobsArrays]], num_rows: int) -> LogprobsArrays:
    """Put the parts' rows at their places in an array of `num_rows`; rows and columns nobody asked for are zero."""
    width = max(part.token_ids.shape[1] for _, part in parts)
    merged = LogprobsArrays(
        token_ids=np.zeros((num_rows, width), dtype=np.int32),
        logprobs=np.zeros((num_rows, width), dtype=np.float32),
        ranks=np.zeros(num_rows, dtype=np.int32),
    )
    for rows, part in parts:
        merged.token_ids[rows, : part.token_ids.shape[1]] = part.token_ids
        merged.logprobs[rows, : part.token_ids.shape[1]] = part.logprobs
        merged.ranks[rows] = part.ranks
    return merged
