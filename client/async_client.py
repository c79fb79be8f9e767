"""The asyncio client for a core in a process of its own."""

import asyncio
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from ..protocol.errors import EngineDeadError
from ..protocol.outputs import EngineCoreOutputs, UtilityOutput
from ..protocol.requests import EngineCoreRequest, UtilityRequest
from .base import AsyncEngineCoreClient
from .connection import ClientAddresses, Connection
from .remote_errors import utility_result

DETACH_WAIT = 1.0  # seconds a shutdown in another thread waits for the event loop to let go of the sockets


class AsyncMPClient(AsyncEngineCoreClient):
    """The event loop itself watches the output socket and the core's process; there is no thread and no task.

    The first call ties the client to its event loop. A call from another one moves it there if the first has stopped,
    and raises RuntimeError while that runs.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._receiver = Receiver(connection)
        self._finalizer = weakref.finalize(self, self._receiver.close, 0.0)
        self.vllm_config = connection.vllm_config
        self._call_ids = itertools.count()

    def client_addresses(self, client_index: int) -> ClientAddresses:
        """For a further client of this one's core, in whatever process, to be passed to `make_async_client`."""
        return self._connection.addresses.of_client(client_index)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._receiver.next_outputs()

    @property
    def has_output(self) -> bool:
        return self._receiver.has_outputs

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._receiver.attach()
        self._connection.add(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.engine_dead:
            self._receiver.attach()
            self._connection.abort(request_ids)

    def call_utility(self, method: str, *args: object) -> Awaitable[Any]:
        return self._call_utility(method, args)

    async def _call_utility(self, method: str, args: tuple[object, ...]) -> Any:
        call = UtilityRequest(0, next(self._call_ids), method, list(args))
        return utility_result(await self._receiver.call(call), method)

    @property
    def engine_dead(self) -> bool:
        return self._connection.dead

    def dead_error(self) -> EngineDeadError:
        return self._connection.dead_error()

    def shutdown(self, timeout: float | None = None) -> None:
        """Callable from any thread, with or without a loop. What the core finished meanwhile is still handed out by
        `get_output_async`; then waiters wake with EngineDeadError.
        """
        self._receiver.close(self._drain_seconds(timeout))
        if self._connection.released:  # else a busy event loop has still to let go of the sockets
            self._finalizer.detach()


class Receiver:
    """What comes from the core, and who waits for it. Does not keep the client alive.

    All methods but `close` belong to the thread of the event loop.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: tuple[int, ...] = ()  # descriptors that the loop watches
        self._timer: asyncio.TimerHandle | None = None
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._waiters: list[asyncio.Future[None]] = []  # for outputs
        self._answers: dict[int, asyncio.Future[UtilityOutput]] = {}

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    async def next_outputs(self) -> EngineCoreOutputs:
        """Raises EngineDeadError once there can be no more."""
        while not self._outputs:
            if self._connection.drained:
                raise self._connection.dead_error()
            self.attach()
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self._outputs.popleft()

    async def call(self, call: UtilityRequest) -> UtilityOutput:
        """Raises EngineDeadError when the core dies before it answers."""
        self.attach()
        answer: asyncio.Future[UtilityOutput] = asyncio.get_running_loop().create_future()
        self._answers[call.call_id] = answer
        try:
            self._connection.call(call)
            return await answer
        finally:
            self._answers.pop(call.call_id, None)

    def attach(self) -> None:
        """Receives in the running event loop from now on."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("the engine is in use in another event loop, which is still running")
        self._unwatch()
        self._waiters.clear()
        self._answers.clear()
        self._loop = loop
        self._watch(self._connection.descriptors)

    def _watch(self, descriptors: tuple[int, ...]) -> None:
        """Lets the loop watch these, and no others."""
        loop, before, self._watched = self._loop, self._watched, descriptors
        if descriptors == before or loop is None or loop.is_closed():
            return
        for descriptor in before:
            if descriptor not in descriptors:
                loop.remove_reader(descriptor)
        for descriptor in descriptors:
            if descriptor not in before:
                loop.add_reader(descriptor, self._receive)
                loop.call_soon(self._receive)  # a socket announces only what comes from now on

    def _unwatch(self) -> None:
        self._watch(())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _receive(self) -> None:
        """Takes all that is there: ZMQ announces a message once, not as long as it is there."""
        while (received := self._connection.receive_nowait()) is not None:
            self._dispatch(received)
        self._watch(self._connection.descriptors)
        if self._connection.drained:
            self._fail_answers()
            self._wake_waiters()
        elif self._timer is None and (delay := self._connection.look_again_in) is not None and self._loop is not None:
            self._timer = self._loop.call_later(delay, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._receive()

    def _dispatch(self, received: EngineCoreOutputs) -> None:
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

    def _fail_answers(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._connection.dead_error())

    # The end

    def close(self, drain_timeout: float) -> None:
        """Ends the core; in any thread."""
        if self._connection.is_fork:
            return
        self._connection.stop(drain_timeout)
        self._in_loop(self._detach)

    def _detach(self) -> None:
        """The sockets are closed only once the loop does not watch them: others may get their descriptors."""
        while (received := self._connection.receive_nowait()) is not None:
            self._dispatch(received)
        self._unwatch()
        self._connection.release()
        self._fail_answers()
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
