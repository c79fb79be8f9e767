"""Finds stop strings in text that arrives in pieces. Used by the detokenizer."""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """`stop` was found; the text is to be cut to `length` characters."""

    stop: str
    length: int


class StopStringFinder:
    """Looks for the stop string that is complete first, so that the result does not depend on the pieces.

    Of two that end at the same character the earlier in `stops` counts. With `include` the text keeps the stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self.stops = tuple(stops)
        self.include = include

    def find(self, text: str, num_new_chars: int) -> StopMatch | None:
        """A match that ends in the last `num_new_chars` of `text`."""
        if num_new_chars <= 0:
            return None
        new_from = len(text) - num_new_chars
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            begin = text.find(stop, max(new_from - len(stop) + 1, 0))
            if begin >= 0 and (best is None or begin + len(stop) < best[0]):
                best = (begin + len(stop), begin, stop)
        if best is None:
            return None
        end, begin, stop = best
        return StopMatch(stop, end if self.include else begin)
