"""What a paused scheduler still does. Set by `EngineCore`, obeyed by the scheduler."""

import enum


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1  # finishes what it has begun, preempted requests included, and begins nothing
    PAUSED_ALL = 2  # nothing
