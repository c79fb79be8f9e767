"""Which of the tokens drawn along a draft are kept. Called by the model runner, over the lines of a step's sampler."""

from collections.abc import Mapping, Sequence

import numpy as np


def lines_ahead(rows: np.ndarray) -> np.ndarray:
    """[n] int64: for each line, how many of the same row come before it. rows: [n] int64, equal ones side by side."""
    lines = np.arange(len(rows))
    begins = np.diff(rows, prepend=-1) != 0
    return lines - np.maximum.accumulate(np.where(begins, lines, 0))


def kept_lines(
    rows: np.ndarray, ahead: np.ndarray, token_ids: np.ndarray, drafts: Mapping[int, Sequence[int]]
) -> np.ndarray:
    """[m] int64, the lines that count: a row's first, and each one whose draft was drawn in the line before.

    Draws and drafts are compared, nothing is resampled: every line was drawn with its own position's noise, so the
    tokens kept are those that would have come one by one. rows, ahead, token_ids: [n] int64; drafts: by row.
    """
    kept: list[int] = []
    for line, (row, place) in enumerate(zip(rows.tolist(), ahead.tolist(), strict=True)):
        if place == 0 or (kept[-1] == line - 1 and token_ids[line - 1] == drafts[row][place - 1]):
            kept.append(line)
    return np.array(kept, dtype=np.int64)
