"""A connection that outlives its core: when that dies, a new one takes over. Built only where `engine_restart` asks.

The callers of a replaced core see a pause. Its unfinished requests go on from their prompts and tokens so far, with the
tokens they would have had, since sampling depends on seed and position only. Where the core was paused or asleep, so is
the new one. Calls that the core has not answered fail.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from ..protocol.codec import MsgpackEncoder
from ..protocol.config import VllmConfig
from ..protocol.errors import EngineDeadError
from ..protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
from ..protocol.requests import EngineCoreRequest, UtilityRequest
from .connection import ClientAddresses, CoreConnection
from .replay import AdapterMirror, PauseMirror, UnfinishedRequests

logger = logging.getLogger("corespan.client")

RESTART_WINDOW = 600.0  # seconds in which `engine_restart` restarts are the limit
FIRST_DELAY = 0.5  # seconds before the second of several restarts with no token between them; then doubled
LONGEST_DELAY = 30.0
OWN_CALL_ID = -1  # of the calls that no client made


class RestartingConnection:
    """A `Connection`; `current` is that to the present core. Thread-safe, but for one reader at a time.

    What becomes of a dead core's requests and calls is received like a core's own messages. Its reader notices the
    death; a thread starts the next core, and the reader then lets it take over.
    """

    def __init__(self, start: Callable[[], CoreConnection], vllm_config: VllmConfig, limit: int) -> None:
        """Starts the first core; raises what `start` raises. `limit`: restarts in RESTART_WINDOW."""
        self._start = start
        self._limit = limit
        fcfs = vllm_config.scheduler_config.policy == "fcfs"
        self._unfinished = UnfinishedRequests(vllm_config.scheduler_config.max_num_seqs if fcfs else None)
        self._pause = PauseMirror()
        lora_config = vllm_config.lora_config
        self._adapters = AdapterMirror(0 if lora_config is None else lora_config.max_cpu_loras)
        self._unanswered: dict[int, UtilityRequest] = {}  # calls that the present core has got
        self._waiting_calls: list[UtilityRequest] = []  # for the next core
        self._own_messages: deque[EngineCoreOutputs] = deque()  # what becomes of a dead core's requests and calls
        self._encoder = MsgpackEncoder()
        self._lock = threading.RLock()  # guards everything here but the wait for a message
        self._closing = threading.Event()
        self._restarts: deque[float] = deque()  # when each began
        self._num_futile = 0  # restarts since the last message of a core
        self._restarting = False
        self._successor: CoreConnection | None = None
        self.released = False
        self.current = start()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when a restart has come to its end

    # As a connection: state

    @property
    def vllm_config(self) -> VllmConfig:
        return self.current.vllm_config

    @property
    def addresses(self) -> ClientAddresses:
        return self.current.addresses

    @property
    def is_fork(self) -> bool:
        return self.current.is_fork

    @property
    def dead(self) -> bool:
        """Whether the core is gone and none takes its place."""
        with self._lock:
            return not self._may_go_on() and self.current.dead

    @property
    def drained(self) -> bool:
        with self._lock:
            return not self._own_messages and not self._may_go_on() and self.current.drained

    def dead_error(self) -> EngineDeadError:
        return self.current.dead_error()

    @property
    def num_held(self) -> int:
        with self._lock:
            return self._unfinished.num_held

    def _may_go_on(self) -> bool:
        return not self._closing.is_set() and (self._restarting or self._has_restarts_left())

    def _has_restarts_left(self) -> bool:
        while self._restarts and self._restarts[0] < time.monotonic() - RESTART_WINDOW:
            self._restarts.popleft()
        return len(self._restarts) < self._limit

    # As a connection: sending

    def add(self, request: EngineCoreRequest) -> None:
        with self._lock:
            if self.dead:
                raise self.dead_error()
            self._encoder.encode(request)  # what cannot be sent is refused now, not when another core is to take it
            self._unfinished.add(request)
            self._send_due()

    def abort(self, request_ids: list[str]) -> None:
        with self._lock:
            self._unfinished.discard(request_ids)
            if not self.current.dead:
                self.current.abort(request_ids)
                self._send_due()

    def call(self, call: UtilityRequest) -> None:
        """Where the core is dead, the next one is asked."""
        with self._lock:
            if self.dead:
                raise self.dead_error()
            self._encoder.encode(call)
            if self.current.dead:
                self._waiting_calls.append(call)
            else:
                self._send_call(call)

    def _send_call(self, call: UtilityRequest) -> None:
        self._unanswered[call.call_id] = call
        with contextlib.suppress(EngineDeadError):  # then it fails with the others that are unanswered
            self.current.call(call)

    def _send_due(self) -> None:
        """What comes while the core is dead waits for the next one."""
        if self.current.dead:
            return
        while due := self._unfinished.take_due():
            for request in due:
                with contextlib.suppress(EngineDeadError):
                    self.current.add(request)

    # As a connection: receiving

    @property
    def descriptors(self) -> tuple[int, ...]:
        with self._lock:
            if self.released:
                return ()
            return (self._wakeup,) if self._restarting else (self._wakeup, *self.current.descriptors)

    @property
    def look_again_in(self) -> float | None:
        return None if self._restarting else self.current.look_again_in

    def wait(self) -> None:
        if self._own_messages:
            return
        if not self._restarting:
            self.current.wait()
            return
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        poller.poll()

    def receive_nowait(self) -> EngineCoreOutputs | None:
        with self._lock:
            if self._restarting:
                self._end_restart()
            if self._own_messages:
                return self._own_messages.popleft()
            if self._restarting:
                return None
        received = self.current.receive_nowait()
        with self._lock:
            if received is not None:
                self._record(received)
            elif self.current.drained and self._may_go_on():
                self._begin_restart()
                return self._own_messages.popleft() if self._own_messages else None
        return received

    def _record(self, outputs: EngineCoreOutputs) -> None:
        self._num_futile = 0
        self._unfinished.record(outputs)
        if outputs.utility_output is not None:
            self._record_answer(outputs.utility_output)
        self._send_due()

    def _record_answer(self, answer: UtilityOutput) -> None:
        call = self._unanswered.pop(answer.call_id, None)
        if answer.failure_message is None:
            if call is not None:
                self._pause.record(call.method, call.args)
                self._adapters.record(call.method, call.args)
        elif answer.call_id == OWN_CALL_ID:
            logger.error("The new engine core is not as the old one was: %s", answer.failure_message)

    # A restart

    def _begin_restart(self) -> None:
        """The core is dead and all that it sent has been received."""
        given_up = self._unfinished.on_death(paused=self._pause.is_paused, killed=self.current.was_killed)
        cause = self.current.dead_error().cause or ""
        if given_up:
            self._own_messages.append(_ends_of(given_up, f"the engine core died of this request twice: {cause}"))
        for call_id in self._unanswered:
            failed = UtilityOutput(call_id, failure_message=cause, failure_type=EngineDeadError.__name__)
            self._own_messages.append(EngineCoreOutputs(utility_output=failed))
        self._unanswered.clear()
        self._restarting = True
        threading.Thread(target=self._restart, name="core-restart", daemon=True).start()

    def _restart(self) -> None:
        """In a thread of its own: starting a core takes seconds."""
        successor = self._start_again()
        with self._lock:
            if not self._closing.is_set():
                self._successor, successor = successor, None
            if not self.released:
                os.eventfd_write(self._wakeup, 1)
        if successor is not None:
            successor.close()

    def _start_again(self) -> CoreConnection | None:
        while self._has_restarts_left() and not self._closing.is_set():
            self._restarts.append(time.monotonic())
            delay = min(FIRST_DELAY * 2 ** (self._num_futile - 1), LONGEST_DELAY) if self._num_futile else 0.0
            self._num_futile += 1
            logger.warning("Starting a new engine core (%d of %d)", len(self._restarts), self._limit)
            if self._closing.wait(delay):
                break
            try:
                return self._start()
            except Exception:
                logger.exception("The new engine core did not start")
        return None

    def _end_restart(self) -> None:
        """If the thread is done: brings the new core to where the dead one was. Without one, the end is final."""
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return
        self._restarting = False
        successor, self._successor = self._successor, None
        if successor is None:
            return
        dead, self.current = self.current, successor
        dead.release()
        with contextlib.suppress(EngineDeadError):  # then the next one is told the same
            for method, args in [*self._adapters.calls(), *self._pause.calls()]:
                successor.call(UtilityRequest(0, OWN_CALL_ID, method, args))
        self._send_due()
        calls, self._waiting_calls = self._waiting_calls, []
        for call in calls:
            self._send_call(call)

    # The end

    def stop(self, drain_timeout: float) -> None:
        if self.is_fork:
            return
        with self._lock:
            self._closing.set()
            successor, self._successor = self._successor, None
            if self._restarting and not self.released:
                os.eventfd_write(self._wakeup, 1)  # whoever waits for a new core
        if successor is not None:
            successor.close()
        self.current.stop(drain_timeout)

    def release(self) -> None:
        self.current.release()
        with self._lock:
            if not self.released and not self.is_fork:
                self.released = True
                os.close(self._wakeup)

    def close(self, drain_timeout: float = 0.0) -> None:
        self.stop(drain_timeout)
        self.release()


def _ends_of(requests: list[EngineCoreRequest], reason: str) -> EngineCoreOutputs:
    outputs = [
        EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=FinishReason.ERROR,
            stop_reason=reason,
            trace_headers=request.trace_headers,
            handle=request.handle,
        )
        for request in requests
    ]
    return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())
