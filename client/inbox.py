"""What the asyncio client receives, and who waits for it. Lives in the event loop; does not keep the client alive."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from ..protocol.errors import EngineDeadError
from ..protocol.outputs import EngineCoreOutputs, UtilityOutput
from ..protocol.requests import UtilityRequest
from .link import CoreLink
from .supervisor import Supervisor

DETACH_WAIT = 1.0  # seconds a shutdown in another thread waits for the event loop to let go of the sockets


class Inbox:
    """All methods but `close` belong to the thread of the event loop. While a dead core is being replaced, in a thread
    of its own, there is no link to receive from, and waiters wait on.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: CoreLink | None = None  # the one the loop watches
        self._reviving = False
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._waiters: list[asyncio.Future[None]] = []  # for outputs, or for a core
        self._answers: dict[int, asyncio.Future[UtilityOutput]] = {}

    async def next_outputs(self) -> EngineCoreOutputs:
        """Raises EngineDeadError once there can be no more."""
        while not self._outputs:
            self._ensure_alive()
            self.attach()
            await self._change()
        return self._outputs.popleft()

    async def call(self, call_id: int, method: str, args: list[object]) -> UtilityOutput:
        """Raises EngineDeadError when the core dies before it answers."""
        while True:
            self._ensure_alive()
            self.attach()
            link = self._supervisor.link
            if link.dead_cause is None:
                break
            await self._change()
        answer: asyncio.Future[UtilityOutput] = asyncio.get_running_loop().create_future()
        self._answers[call_id] = answer
        try:
            self._supervisor.call(link, UtilityRequest(0, call_id, method, args))
            return await answer
        finally:
            self._answers.pop(call_id, None)

    def _ensure_alive(self) -> None:
        if self._supervisor.dead:
            raise self._supervisor.dead_error()

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    # Receiving

    def attach(self) -> None:
        """Receives in the running event loop from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and self._loop.is_running():
                raise RuntimeError("the engine is in use in another event loop, which is still running")
            self._detach()
            self._waiters.clear()
            self._answers.clear()
            self._loop = loop
        link = self._supervisor.link
        if link is not self._link and not self._reviving and not link.released:
            self._watch(loop, link)

    def _watch(self, loop: asyncio.AbstractEventLoop, link: CoreLink) -> None:
        self._link = link
        if link.dead_cause is not None:
            loop.call_soon(self._bury, link)
            return
        loop.add_reader(link.output_fd, self._receive)
        loop.add_reader(link.process.channel.fileno(), self._on_channel_readable, link)
        loop.call_soon(self._receive)  # the socket announces only what comes from now on

    def _detach(self) -> None:
        link, self._link = self._link, None
        if link is None or self._loop is None or self._loop.is_closed():
            return
        self._loop.remove_reader(link.output_fd)
        self._loop.remove_reader(link.process.channel.fileno())

    def _receive(self) -> None:
        """Takes all that is there: ZMQ announces a message once, not as long as it is there."""
        link = self._link
        if link is None:
            return
        while (received := link.receive_nowait()) is not None:
            self._supervisor.record(received)
            self._sort(received)
        if link.dead_cause is not None:
            self._bury(link)

    def _sort(self, received: EngineCoreOutputs) -> None:
        if received.utility_output is None:
            self._outputs.append(received)
            self._wake_waiters()
            return
        answer = self._answers.get(received.utility_output.call_id)
        if answer is not None and not answer.done():
            answer.set_result(received.utility_output)

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Death

    def _on_channel_readable(self, link: CoreLink) -> None:
        if link.process.poll_death() and self._loop is not None:
            self._loop.remove_reader(link.process.channel.fileno())
            self._loop.call_later(link.last_outputs_wait_ms() / 1000, self._bury, link)

    def _bury(self, link: CoreLink) -> None:
        """Takes the last outputs of a dead core, fails who asked it something, and sees to its successor."""
        if link is not self._link or self._loop is None:
            return
        if link.dead_cause is None:
            while (received := link.receive_nowait()) is not None:
                self._supervisor.record(received)
                self._sort(received)
            link.mark_dead()
        self._detach()
        self._fail_answers(link.dead_error())
        if self._supervisor.may_restart:
            self._reviving = True
            revive = threading.Thread(target=self._revive, args=(self._loop,), name="core-restart", daemon=True)
            revive.start()
        self._wake_waiters()

    def _revive(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: starting a core takes seconds."""
        try:
            given_up = self._supervisor.revive()
        except EngineDeadError:
            given_up = EngineCoreOutputs()
        try:
            loop.call_soon_threadsafe(self._go_on, given_up)
        except RuntimeError:  # the loop was closed meanwhile; whoever comes with the next one finds this
            self._reviving = False
            self._outputs.append(given_up)

    def _go_on(self, given_up: EngineCoreOutputs) -> None:
        self._reviving = False
        if given_up.outputs:
            self._outputs.append(given_up)
        if self._loop is not None and self._supervisor.link.dead_cause is None:
            self._watch(self._loop, self._supervisor.link)
        self._wake_waiters()

    def _fail_answers(self, error: EngineDeadError) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def close(self, drain_timeout: float) -> None:
        """Ends the core; in any thread."""
        if self._supervisor.link.is_fork:
            return
        last_outputs = self._supervisor.stop(drain_timeout)
        self._in_loop(lambda: self._let_go(last_outputs))

    def _let_go(self, last_outputs: list[EngineCoreOutputs]) -> None:
        """The sockets are closed only once the loop does not watch them: others may get their descriptors."""
        self._outputs.extend(last_outputs)
        self._detach()
        self._supervisor.release()
        self._fail_answers(self._supervisor.dead_error())
        self._wake_waiters()

    def _in_loop(self, action: Callable[[], None]) -> None:
        """Runs `action` in the loop's thread if the loop runs in another one, else here.

        Where the loop is busy it happens later; where it stops before, whenever this is asked for again.
        """
        loop = self._loop
        if loop is None or not loop.is_running() or loop is _running_loop():
            action()
            return
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        loop.call_soon_threadsafe(act)
        done.wait(DETACH_WAIT)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
