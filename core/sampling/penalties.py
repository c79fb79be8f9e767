"""Presence, frequency and repetition penalties: which tokens each row has, and what they cost. Used by `SamplingBatch`.

Only the tokens a row has are stored and touched, so a row without penalties costs nothing and stays bit-identical.
"""

from __future__ import annotations

import numpy as np

from ...protocol.resolved_sampling import ResolvedSampling
from ..kernels import sampling as native
from ..kernels.memory import Array, as_tensor
from ..lazy_torch import torch

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


def uses_penalties(params: ResolvedSampling) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


class TokenCounts:
    """The distinct tokens of one request and how often each was generated (0: in the prompt only)."""

    def __init__(self, params: ResolvedSampling, prompt_token_ids: list[int], output_token_ids: list[int]) -> None:
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.repetition = min(max(params.repetition_penalty, _SMALLEST), _LARGEST)
        prompt = dict.fromkeys(prompt_token_ids) if params.repetition_penalty != 1.0 else {}
        self._slots = {token_id: slot for slot, token_id in enumerate(prompt)}
        capacity = 2 * len(self._slots) + 64
        self._token_ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._token_ids[: len(self._slots)] = list(self._slots)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def token_ids(self) -> np.ndarray:
        """[distinct tokens] int64."""
        return self._token_ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        """[distinct tokens] float32, parallel to `token_ids`."""
        return self._counts[: len(self._slots)]


def apply_penalties(logits: Array, rows: list[int], counts: list[TokenCounts]) -> None:
    """Penalise in place. logits: [num_rows, width] float32; `counts[i]` belongs to row `rows[i]`.

    A seen token's logit is divided by the repetition penalty if positive, else multiplied by it; then each generated
    token loses frequency * count + presence.
    """
    if not counts:
        return
    settings = np.array([(row.repetition, row.frequency, row.presence) for row in counts], dtype=np.float32)
    if native.supports(logits):
        seen = [(row.token_ids, row.counts) for row in counts]
        native.penalise(logits, np.array(rows, dtype=np.int64), seen, np.ascontiguousarray(settings.T))
    else:
        torch_penalties(as_tensor(logits), rows, counts, settings)


def torch_penalties(logits: torch.Tensor, rows: list[int], counts: list[TokenCounts], settings: np.ndarray) -> None:
    """As `kernels.sampling.penalise`: the reference, and what serves without the kernels or on another device."""
    lengths = [len(row.token_ids) for row in counts]
    width = logits.shape[1]
    flat = np.concatenate([row.token_ids + at * width for at, row in zip(rows, counts, strict=True)])
    generated = np.concatenate([row.counts for row in counts])
    repetition, frequency, presence = np.repeat(settings, lengths, axis=0).T
    index = torch.from_numpy(flat).to(logits.device)
    values = logits.view(-1)[index]
    repetition_penalty = torch.from_numpy(repetition.copy()).to(logits.device)
    values = torch.where(values > 0, values / repetition_penalty, values * repetition_penalty)
    values -= torch.from_numpy(frequency * generated + presence * (generated > 0)).to(logits.device)
    logits.view(-1)[index] = values.clamp_(max=_LARGEST)
