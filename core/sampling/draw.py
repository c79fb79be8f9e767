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
    float64, 1: off; uniforms [n] float64 in [0, 1). `recorded`: the draw that reads these arrays, for its next time."""

    temperature: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    uniforms: np.ndarray
    recorded: native.Draw | None = None


def draw(
    logits: torch.Tensor, params: DrawParams, processed: torch.Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, [n] int64, which the next draw with these parameters may overwrite, and each row's largest logit, [n]
    float32. A row whose largest logit is not finite is not drawn from; ignore its token.

    logits: [n, vocab] float32. processed: [n, vocab] float32, takes the logits over temperature that the tokens were
    drawn from, -inf where not kept; greedy rows as they were.
    """
    recorded = params.recorded
    if recorded is None or recorded.logits_at != logits.data_ptr() or processed is not None:
        arrays = params.temperature, params.min_p, params.top_k, params.top_p, params.uniforms
        if not native.supports(logits):
            return torch_draw.draw(logits, *arrays, processed)
        recorded = native.Draw(logits, *arrays, processed)
        params.recorded = recorded if processed is None else None
    return recorded.run()
