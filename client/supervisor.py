"""Keeps a core behind a client: passes requests on to it and, if the configuration says so, replaces it when it dies.

The callers of a replaced core see a pause. Its unfinished requests go on from their prompts and tokens so far, with the
tokens they would have had, since sampling depends on seed and position only. Where the core was paused or asleep, so is
the new one.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ..protocol.codec import MsgpackEncoder
from ..protocol.config import VllmConfig
from ..protocol.errors import EngineDeadError
from ..protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
from ..protocol.requests import EngineCoreRequest, EngineCoreRequestType, UtilityRequest
from .halt import Halt
from .ledger import Ledger
from .link import CoreLink

logger = logging.getLogger("corespan.client")

RESTART_WINDOW = 600.0  # seconds in which `engine_restart` restarts are the limit
FIRST_DELAY = 0.5  # seconds before the second of several restarts with no token between them; then doubled
LONGEST_DELAY = 30.0
OWN_CALL_ID = -1  # of the calls that no client made


class Supervisor:
    """`link` is the present core. Requests go through `add`, aborts through `abort`, utility calls through `call`;
    whatever the link receives must be shown to `record`. Thread-safe.
    """

    def __init__(self, start: Callable[[], CoreLink], vllm_config: VllmConfig, restarts: int) -> None:
        """Starts the first core; raises what `start` raises."""
        self._start = start
        self._limit = restarts
        fcfs = vllm_config.scheduler_config.policy == "fcfs"
        self._ledger = Ledger(vllm_config.scheduler_config.max_num_seqs if fcfs else None)
        self._halt = Halt()
        self._calls: dict[int, UtilityRequest] = {}  # that the present core has not answered yet
        self._encoder = MsgpackEncoder()
        self._lock = threading.RLock()  # guards these three and which link is the present one
        self._revival = threading.Lock()
        self._reviving = False
        self._closing = threading.Event()
        self._restarts: deque[float] = deque()
        self._fruitless = 0  # restarts since the last token
        self.link = start()

    @property
    def dead(self) -> bool:
        """Whether the core is gone and none will take its place."""
        return self.link.check_death() and not self.may_restart

    @property
    def may_restart(self) -> bool:
        """Whether a core that dies now is replaced, or one that has died is being replaced."""
        return not self._closing.is_set() and (self._reviving or self._has_restarts_left())

    def _has_restarts_left(self) -> bool:
        while self._restarts and self._restarts[0] < time.monotonic() - RESTART_WINDOW:
            self._restarts.popleft()
        return len(self._restarts) < self._limit

    @property
    def num_held(self) -> int:
        """Requests that no core has, since others are to be tried before them."""
        with self._lock:
            return self._ledger.num_held

    def dead_error(self) -> EngineDeadError:
        return self.link.dead_error()

    def add(self, request: EngineCoreRequest) -> None:
        """Raises what `CoreLink.send` raises, but EngineDeadError only when no other core will take the dead one's
        place.
        """
        if not self._limit:
            self.link.send(EngineCoreRequestType.ADD, request)
            return
        with self._lock:
            if self.dead:
                raise self.dead_error()
            self._encoder.encode(request)  # what cannot be sent is refused now, not when another core is to take it
            self._ledger.add(request)
            self._send_due()

    def call(self, link: CoreLink, call: UtilityRequest) -> None:
        """Asks the core behind `link`. Raises what `CoreLink.send` raises."""
        if self._limit:
            with self._lock:
                self._calls[call.call_id] = call
        try:
            link.send(EngineCoreRequestType.UTILITY, call)
        except Exception:
            with self._lock:
                self._calls.pop(call.call_id, None)
            raise

    def abort(self, request_ids: list[str]) -> None:
        with self._lock:
            self._ledger.discard(request_ids)
            try:
                self.link.send(EngineCoreRequestType.ABORT, request_ids)
                self._send_due()
            except EngineDeadError:
                return  # then nothing is left to be aborted

    def record(self, outputs: EngineCoreOutputs) -> None:
        if not self._limit:
            return
        with self._lock:
            self._fruitless = 0
            self._ledger.record(outputs)
            if outputs.utility_output is not None:
                self._record_answer(outputs.utility_output)
            self._send_due()

    def _record_answer(self, answer: UtilityOutput) -> None:
        call = self._calls.pop(answer.call_id, None)
        if answer.failure_message is None:
            if call is not None:
                self._halt.record(call.method, call.args)
        elif answer.call_id == OWN_CALL_ID:
            logger.error("The new engine core is not halted as the old one was: %s", answer.failure_message)

    def _send_due(self) -> None:
        """What comes while the core is dead waits for its successor."""
        if not self._limit or self.link.check_death():
            return
        while due := self._ledger.take_due():
            for request in due:
                try:
                    self.link.send(EngineCoreRequestType.ADD, request)
                except EngineDeadError:
                    return

    def revive(self) -> EngineCoreOutputs:
        """Puts a new core in the place of the dead one, and hands it all that is unfinished. Blocks meanwhile.

        Returns the ends of the requests that are given up, because the core died of them twice. Raises EngineDeadError
        when there are to be no more restarts.
        """
        with self._revival:
            if self.link.dead_cause is None:
                return EngineCoreOutputs()
            self._reviving = True
            try:
                dead, link = self.link, self._start_again()
                given_up = self._install(link, dead.was_killed)
            finally:
                self._reviving = False
            dead.release()
            if self._closing.is_set():
                link.close()
        reason = f"the engine core died of this request twice: {dead.dead_cause}"
        return EngineCoreOutputs(
            outputs=[
                EngineCoreOutput(
                    request.request_id,
                    [],
                    finish_reason=FinishReason.ERROR,
                    stop_reason=reason,
                    trace_headers=request.trace_headers,
                )
                for request in given_up
            ],
            timestamp=time.monotonic(),
        )

    def _install(self, link: CoreLink, killed: bool) -> list[EngineCoreRequest]:
        """Brings a new core to where the dead one was, which SIGKILL may have ended. Returns the requests given up."""
        with self._lock:
            self.link = link
            self._calls.clear()
            given_up = self._ledger.bury(halted=bool(self._halt), killed=killed)
            with contextlib.suppress(EngineDeadError):  # then the next one is told the same
                for method, args in self._halt.calls():
                    link.send(EngineCoreRequestType.UTILITY, UtilityRequest(0, OWN_CALL_ID, method, args))
            self._send_due()
        return given_up

    def _start_again(self) -> CoreLink:
        while self._has_restarts_left() and not self._closing.is_set():
            self._restarts.append(time.monotonic())
            delay = min(FIRST_DELAY * 2 ** (self._fruitless - 1), LONGEST_DELAY) if self._fruitless else 0.0
            self._fruitless += 1
            logger.warning("Starting a new engine core (%d of %d)", len(self._restarts), self._limit)
            if self._closing.wait(delay):
                break
            try:
                return self._start()
            except Exception:
                logger.exception("The new engine core did not start")
        raise self.dead_error()

    def stop(self, drain_timeout: float) -> list[EngineCoreOutputs]:
        """Ends the core for good. Returns what it sent meanwhile and nobody took."""
        self._closing.set()
        return self.link.stop(drain_timeout)

    def release(self) -> None:
        self.link.release()

    def close(self, drain_timeout: float = 0.0) -> list[EngineCoreOutputs]:
        last_outputs = self.stop(drain_timeout)
        self.release()
        return last_outputs
