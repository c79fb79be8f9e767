"""`RepetitionDetectionParams`: when a request that only repeats itself is ended. Part of `SamplingParams`; the core's
requests obey it.
"""

import msgspec

from .param_checks import int_at_least, reject


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True, repr_omit_defaults=True):
    """A request ends when its output ends with `min_count` repetitions of one pattern of tokens.

    The pattern has `min_pattern_size` to `max_pattern_size` tokens; a `min_pattern_size` of 0 means 1. With a
    `max_pattern_size` of 0 nothing is looked for.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            setattr(self, name, int_at_least(f"repetition_detection.{name}", getattr(self, name), 0))
        if self.min_pattern_size > self.max_pattern_size:
            legal = f"at most max_pattern_size ({self.max_pattern_size})"
            reject("repetition_detection.min_pattern_size", self.min_pattern_size, legal)
        if self.enabled and self.min_count < 2:
            reject("repetition_detection.min_count", self.min_count, "an integer of at least 2")

    @property
    def enabled(self) -> bool:
        return self.max_pattern_size > 0
