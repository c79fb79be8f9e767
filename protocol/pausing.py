"""The ways to pause an engine, and the levels of its sleep: named by callers, carried out by the core."""

from typing import Literal, get_args

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests in flight: they end, they finish first, or they stay frozen."""

PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)

SLEEP_LEVELS: dict[int, frozenset[str]] = {
    0: frozenset(),
    1: frozenset({"kv_cache"}),
    2: frozenset({"kv_cache", "weights"}),
}
"""The memory that a sleep of each level gives back."""

WAKE_UP_TAGS = ("weights", "kv_cache", "scheduling")
"""The parts of a sleep that `wake_up` can undo by themselves."""
