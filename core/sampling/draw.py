"""The draw: one token for each row of logits. Called by `Sampler`, done by the native kernels or by torch.

What is kept of a row by min-p, top-k and top-p is always the beginning of one order: by value, then by lower id. Of the
kept tokens, in the order of their ids, the first is drawn whose cumulative weight exceeds u * total. Every step works
on single rows in a fixed order, so a row's token depends on that row alone.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..kernels import sampling as native
from . import torch_draw


@dataclass(slots=True)
class DrawParams:
    """For each row: temperature [n] float64, 0: greedy; min_p [n] float64, 0: off; top_k [n] int64, 0: off; top_p [n]
    float64, 1: off; uniforms [n] float64 in [0, 1)."""

    temperature: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    uniforms: np.ndarray


@dataclass(slots=True)
class Drawn:
    """token_ids: [n] int64; largest: [n] float32, each row's largest logit. `processed`, when asked for: [n, vocab],
    the logits over temperature that the tokens were drawn from, -inf where not kept; greedy rows as they were."""

    token_ids: np.ndarray
    largest: np.ndarray
    processed: torch.Tensor | None


def draw(logits: torch.Tensor, params: DrawParams, want_processed: bool = False) -> Drawn:
    """logits: [n, vocab] float32. A row whose largest logit is not finite is not drawn from; ignore its token."""
    processed = torch.empty_like(logits) if want_processed else None
    implementation = native.draw if native.supports(logits) else torch_draw.draw
    token_ids, largest = implementation(
        logits, params.temperature, params.min_p, params.top_k, params.top_p, params.uniforms, processed
    )
    return Drawn(token_ids, largest, processed)
