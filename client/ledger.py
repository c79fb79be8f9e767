"""What is unfinished behind a client: all that a new core needs to go on where a dead one stopped."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from ..protocol.outputs import EngineCoreOutputs
from ..protocol.requests import EngineCoreRequest

PROGRESS = 2
"""Tokens from a core after which a request is not suspected of having killed it."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request with all its tokens so far; `progress` counts those that came from the present core."""

    request: EngineCoreRequest
    tokens: list[int]
    sent: bool = False
    progress: int = 0

    @property
    def suspicious(self) -> bool:
        """Whether the present core may be about to die of it."""
        return self.sent and self.progress < PROGRESS


class Ledger:
    """The unfinished requests of one client, in order of arrival. Not thread-safe.

    A core that has crashed may have died of any request that was running. These suspects go to the new core one by one,
    each when all before it have made progress there, and first those that had made progress before. If it dies again,
    the one on trial is given up. What was not running waits until nobody is suspected any more.

    A core that was killed by SIGKILL more likely died of something outside. Then those that had made progress are not
    suspected, if there were several, and go on at once.
    """

    def __init__(self, max_num_seqs: int | None) -> None:
        """Only the first `max_num_seqs` requests can have been running; None: any."""
        self._max_num_seqs = max_num_seqs
        self._entries: dict[str, Entry] = {}
        self._innocent: list[Entry] = []
        self._suspects: deque[Entry] = deque()
        self._on_trial: Entry | None = None

    @property
    def num_held(self) -> int:
        """Requests that wait here for their turn."""
        return sum(not entry.sent for entry in self._entries.values())

    def add(self, request: EngineCoreRequest) -> None:
        self._entries[request.request_id] = Entry(request, list(request.output_token_ids))

    def discard(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._entries.pop(request_id, None)

    def record(self, outputs: EngineCoreOutputs) -> None:
        """Takes note of outputs that the shell is going to see."""
        for output in outputs.outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            entry.tokens += output.new_token_ids
            entry.progress += len(output.new_token_ids)
            if output.finish_reason is not None:
                del self._entries[output.request_id]

    def take_due(self) -> list[EngineCoreRequest]:
        """The requests to be sent now; they count as sent from here on."""
        if self._innocent:
            due, self._innocent = self._live(self._innocent), []
        elif self._trial_runs() or (self._suspects and any(entry.suspicious for entry in self._possibly_running())):
            due = []
        else:
            self._suspects = deque(self._live(self._suspects))
            self._on_trial = self._suspects.popleft() if self._suspects else None
            due = [self._on_trial] if self._on_trial else [entry for entry in self._entries.values() if not entry.sent]
        return [_send(entry) for entry in due]

    def bury(self, halted: bool = False, killed: bool = False) -> list[EngineCoreRequest]:
        """The core has died; from now on `take_due` is about its successor. Returns the requests given up.

        `halted`: nothing was running, so it died of no request; who was on trial before still is. `killed`: by SIGKILL.
        """
        sent = [entry for entry in self._entries.values() if entry.sent]
        tried = [self._on_trial] if self._on_trial is not None and self._trial_runs() else []
        suspects = [] if halted else [entry for entry in self._possibly_running() if entry.sent and entry not in tried]
        if killed and len(sent) > 1:
            suspects = [entry for entry in suspects if entry.suspicious]
        suspects.sort(key=lambda entry: entry.suspicious)
        unsuspected = [entry for entry in sent if halted or not entry.suspicious]
        self._innocent = [entry for entry in unsuspected if entry not in suspects and entry not in tried]
        self._suspects = deque([*(tried if halted else ()), *suspects, *self._suspects])
        self._on_trial = None
        for entry in sent:
            entry.sent, entry.progress = False, 0
        given_up = [] if halted else [entry.request for entry in tried]
        self.discard(request.request_id for request in given_up)
        return given_up

    def _trial_runs(self) -> bool:
        return self._on_trial in self._live([self._on_trial]) and self._on_trial.suspicious if self._on_trial else False

    def _possibly_running(self) -> list[Entry]:
        return list(self._entries.values())[: self._max_num_seqs]

    def _live(self, entries: Iterable[Entry]) -> list[Entry]:
        return [entry for entry in entries if self._entries.get(entry.request.request_id) is entry]


def _send(entry: Entry) -> EngineCoreRequest:
    entry.sent = True
    return msgspec.structs.replace(entry.request, output_token_ids=list(entry.tokens))
