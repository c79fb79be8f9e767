"""Whether the core is paused or asleep, so far as it has told its client. A new core is brought to the same state."""

from collections.abc import Sequence

_MEMORY = {0: frozenset[str](), 1: frozenset({"kv_cache"}), 2: frozenset({"kv_cache", "weights"})}
"""What a sleep of each level gives back."""


class Halt:
    """True while nothing is scheduled. Not thread-safe."""

    def __init__(self) -> None:
        self._paused = False
        self._asleep: set[str] = set()

    def __bool__(self) -> bool:
        return self._paused

    def record(self, method: str, args: Sequence[object]) -> None:
        """The core has carried out this call."""
        if method == "pause_scheduler":
            self._paused = True
        elif method == "resume_scheduler":
            self._paused = False
        elif method == "sleep":
            self._paused = True
            self._asleep |= _MEMORY[args[0] if args else 1]  # type: ignore[index]
        elif method == "wake_up":
            tags = args[0] if args else None
            self._asleep -= _MEMORY[2] if tags is None else set(tags)  # type: ignore[call-overload]
            self._paused = bool(self._asleep)

    def calls(self) -> list[tuple[str, list[object]]]:
        """What to ask of a core that is awake."""
        if not self._asleep:
            return [("pause_scheduler", ["keep", False])] if self._paused else []
        calls: list[tuple[str, list[object]]] = [("sleep", [2 if "weights" in self._asleep else 1, "keep"])]
        if "kv_cache" not in self._asleep:
            calls.append(("wake_up", [["kv_cache"]]))
        return calls
