"""What a new core must be told to go on where a dead one stopped: unfinished requests, adapters, and whether it was
paused."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ..protocol.lora import LoRARequest
from ..protocol.outputs import EngineCoreOutputs
from ..protocol.pausing import SLEEP_LEVELS
from ..protocol.requests import EngineCoreRequest

PROGRESS = 2
"""Tokens from a core after which a request is not suspected of having killed it."""


class Turn(enum.Enum):
    """When a request goes to the next core."""

    AT_ONCE = enum.auto()
    ALONE = enum.auto()  # in quarantine: the core may have died of it
    LAST = enum.auto()  # once nobody is suspected any more


@dataclass(slots=True, eq=False)
class Entry:
    """A request with all its tokens so far; `progress` counts those that came from the core that has it."""

    request: EngineCoreRequest
    tokens: list[int]
    turn: Turn = Turn.LAST
    sent: bool = False
    progress: int = 0
    had_progress: bool = False  # in the core before

    @property
    def unproven(self) -> bool:
        """Whether the present core may be about to die of it."""
        return self.sent and self.progress < PROGRESS

    @property
    def in_quarantine(self) -> bool:
        return self.unproven and self.turn is Turn.ALONE


class UnfinishedRequests:
    """The unfinished requests of one client, in order of arrival. Not thread-safe.

    A core that has crashed may have died of any request that was running. These go to the new core alone, one after the
    other as each makes progress there, and first those that had made progress before. If it dies again, the one in
    quarantine is given up. What was not running follows when nobody is suspected any more.

    A core that was killed by SIGKILL more likely died of something outside. Then those that had made progress go on at
    once, if there were several requests.
    """

    def __init__(self, max_num_seqs: int | None) -> None:
        """Only the first `max_num_seqs` requests can have been running; None: any."""
        self._max_num_seqs = max_num_seqs
        self._entries: dict[str, Entry] = {}
        self._by_handle: dict[int, Entry] = {}  # of the same requests, those that have a handle

    @property
    def num_held(self) -> int:
        """Requests that wait here for their turn."""
        return sum(not entry.sent for entry in self._entries.values())

    def add(self, request: EngineCoreRequest) -> None:
        entry = self._entries[request.request_id] = Entry(request, list(request.output_token_ids))
        if request.handle:
            self._by_handle[request.handle] = entry

    def discard(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is not None:
                self._by_handle.pop(entry.request.handle, None)

    def record(self, outputs: EngineCoreOutputs) -> None:
        """Takes note of outputs that the shell is going to see."""
        for output in outputs.outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            entry.tokens += output.new_token_ids
            entry.progress += len(output.new_token_ids)
            if output.finish_reason is not None:
                self.discard([output.request_id])
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
            entry = self._by_handle.get(handle)
            if entry is not None:
                entry.tokens.append(token_id)
                entry.progress += 1

    def take_due(self) -> list[EngineCoreRequest]:
        """The requests to be sent now; they count as sent from here on."""
        held = [entry for entry in self._entries.values() if not entry.sent]
        at_once = [entry for entry in held if entry.turn is Turn.AT_ONCE]
        alone = sorted((entry for entry in held if entry.turn is Turn.ALONE), key=lambda entry: not entry.had_progress)
        if at_once:
            due = at_once
        elif any(entry.in_quarantine for entry in self._entries.values()):
            due = []
        elif alone:
            due = [] if any(entry.unproven for entry in self._possibly_running()) else alone[:1]
        else:
            due = held
        for entry in due:
            entry.sent = True
        return [msgspec.structs.replace(entry.request, output_token_ids=list(entry.tokens)) for entry in due]

    def on_death(self, paused: bool = False, killed: bool = False) -> list[EngineCoreRequest]:
        """The core has died; from now on `take_due` is about its successor. Returns the requests given up.

        `paused`: nothing was running, so it died of no request. `killed`: by SIGKILL.
        """
        possibly_running = self._possibly_running()
        given_up = [] if paused else [entry.request for entry in self._entries.values() if entry.in_quarantine]
        self.discard(request.request_id for request in given_up)
        sent = [entry for entry in self._entries.values() if entry.sent]
        spares_proven = killed and len(sent) + len(given_up) > 1
        for entry in sent:
            if paused:
                entry.turn = Turn.ALONE if entry.in_quarantine else Turn.AT_ONCE
            elif entry in possibly_running and (entry.unproven or not spares_proven):
                entry.turn = Turn.ALONE
            else:
                entry.turn = Turn.LAST if entry.unproven else Turn.AT_ONCE
            entry.sent, entry.had_progress, entry.progress = False, not entry.unproven, 0
        return given_up

    def _possibly_running(self) -> list[Entry]:
        return list(self._entries.values())[: self._max_num_seqs]


class AdapterMirror:
    """The adapters that the core has read, so far as it has answered its client: a new core is to read them too. Those
    beyond `capacity` it reads when a request asks for them. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._added: dict[int, list[object]] = {}  # the argument of add_lora, by lora_int_id
        self._pinned: set[int] = set()

    def record(self, method: str, args: Sequence[object]) -> None:
        """The core has carried out this call."""
        if method == "add_lora":
            request = msgspec.convert(args[0], LoRARequest)
            self._added.pop(request.lora_int_id, None)
            self._added[request.lora_int_id] = list(args)
            spare = [each for each in self._added if each not in self._pinned]
            for lora_int_id in spare[: max(len(self._added) - self._capacity, 0)]:
                del self._added[lora_int_id]
        elif method == "pin_lora":
            self._pinned.add(int(args[0]))  # type: ignore[call-overload]
        elif method == "remove_lora":
            self._added.pop(int(args[0]), None)  # type: ignore[call-overload]
            self._pinned.discard(int(args[0]))  # type: ignore[call-overload]

    def calls(self) -> list[tuple[str, list[object]]]:
        """What to ask of a new core."""
        pins: list[tuple[str, list[object]]] = [("pin_lora", [each]) for each in self._pinned if each in self._added]
        return [("add_lora", args) for args in self._added.values()] + pins


class PauseMirror:
    """Whether the core is paused or asleep, so far as it has answered its client. Not thread-safe."""

    def __init__(self) -> None:
        self.is_paused = False  # nothing is scheduled
        self._asleep: set[str] = set()

    def record(self, method: str, args: Sequence[object]) -> None:
        """The core has carried out this call."""
        if method == "pause_scheduler":
            self.is_paused = True
        elif method == "resume_scheduler":
            self.is_paused = False
        elif method == "sleep":
            self.is_paused = True
            self._asleep |= SLEEP_LEVELS[args[0] if args else 1]  # type: ignore[index]
        elif method == "wake_up":
            tags = args[0] if args else None
            self._asleep -= SLEEP_LEVELS[2] if tags is None else set(tags)  # type: ignore[call-overload]
            self.is_paused = bool(self._asleep)

    def calls(self) -> list[tuple[str, list[object]]]:
        """What to ask of a core that is awake."""
        if not self._asleep:
            return [("pause_scheduler", ["keep", False])] if self.is_paused else []
        calls: list[tuple[str, list[object]]] = [("sleep", [2 if "weights" in self._asleep else 1, "keep"])]
        if "kv_cache" not in self._asleep:
            calls.append(("wake_up", [["kv_cache"]]))
        return calls
