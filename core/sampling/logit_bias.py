"""`logit_bias`: what single tokens gain or lose. Used by `SamplingBatch`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...protocol.resolved_sampling import ResolvedSampling
from ..kernels.memory import Array, Buffer
from ..lazy_torch import torch

_LARGEST = float(np.finfo(np.float32).max)


class LogitBias:
    """One request's: token_ids [m] int64, distinct, and values [m] float32."""

    def __init__(self, params: ResolvedSampling) -> None:
        biases = params.logit_bias or {}
        self.token_ids = np.array(list(biases), dtype=np.int64)
        self.values = np.array([min(max(bias, -_LARGEST), _LARGEST) for bias in biases.values()], dtype=np.float32)


def add_biases(logits: Array, lines: Sequence[int], biases: Sequence[LogitBias]) -> None:
    """In place. logits: [num_lines, vocab] float32; `biases[i]` belongs to line `lines[i]`, lines are distinct."""
    width = logits.shape[1]
    places = np.concatenate([bias.token_ids + line * width for line, bias in zip(lines, biases, strict=True)])
    values = np.concatenate([bias.values for bias in biases])
    if isinstance(logits, Buffer):
        logits.reshape(-1)[places] += values
        return
    index = torch.from_numpy(places).to(logits.device)
    logits.view(-1)[index] += torch.from_numpy(values).to(logits.device)
