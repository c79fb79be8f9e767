"""Which of the tokens drawn along a draft are kept. Called by the model runner, over the lines of a step's sampler."""

from collections.abc import Mapping, Sequence

import numpy as np


def lines_ahead(req_ids: Sequence[str]) -> np.ndarray:
    """[n] int64: for each line, how many lines of the same request come before it."""
    ahead = np.zeros(len(req_ids), dtype=np.int64)
    for line in range(1, len(req_ids)):
        if req_ids[line] == req_ids[line - 1]:
            ahead[line] = ahead[line - 1] + 1
    return ahead


def kept_lines(
    req_ids: Sequence[str], ahead: np.ndarray, token_ids: np.ndarray, drafts: Mapping[str, Sequence[int]]
) -> np.ndarray:
    """[m] int64, the lines that count: a request's first, and each one whose draft was drawn in the line before.

    Draws and drafts are compared, nothing is resampled: every line was drawn with its own position's noise, so the
    tokens kept are those that would have come one by one.
    """
    kept: list[int] = []
    for line, (req_id, place) in enumerate(zip(req_ids, ahead.tolist(), strict=True)):
        if place == 0 or (kept[-1] == line - 1 and token_ids[line - 1] == drafts[req_id][place - 1]):
            kept.append(line)
    return np.array(kept, dtype=np.int64)
