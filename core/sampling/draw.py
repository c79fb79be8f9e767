"""The draw: one token for each row of logits. Called by `Sampler`, done by the native kernels or by torch.

What is kept of a row by min-p, top-k and top-p is always the beginning of one order: by value, then by lower id. Of the
kept tokens, in the order of their ids, the first is drawn whose cumulative weight exceeds u * total. Every step works
on single rows in a fixed order, so a row's token depends on that row alone.
"""

from __future__ import annotations

import numpy as np

from ..kernels import sampling as native
from ..kernels.memory import Array, as_tensor
from ..kernels.sampling import Allowed, DrawParams
from . import torch_draw


def draw(
    logits: Array,
    params: DrawParams,
    processed: Array | None = None,
    allowed: Allowed | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, [n] int64, which the next draw with these parameters may overwrite, and each row's largest logit, [n]
    float32. A row whose largest logit is not finite is not drawn from; ignore its token.

    logits: [n, vocab] float32. processed: [n, vocab] float32, takes the logits over temperature that the tokens were
    drawn from, -inf where not kept; greedy rows as they were, but for what is not allowed. The logits stay as they are.
    """
    recorded = params.recorded
    lasts = processed is None and allowed is None
    if recorded is None or recorded.logits_at != logits.data_ptr() or not lasts:
        if not native.supports(logits):
            tensor = as_tensor(logits)
            tensor = tensor if allowed is None else torch_draw.masked(tensor, allowed)
            return torch_draw.draw(tensor, params, None if processed is None else as_tensor(processed))
        recorded = native.Draw(logits, params, processed, allowed)
        params.recorded = recorded if lasts else None
    return recorded.run()


def masked(logits: Array, allowed: Allowed) -> Array:
    """A copy of the logits, [n, vocab], with -inf where a token is not allowed."""
    return native.masked(logits, allowed) if native.supports(logits) else torch_draw.masked(as_tensor(logits), allowed)
