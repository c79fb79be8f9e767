"""The asyncio client for a core in a process of its own."""

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from ..protocol.config import VllmConfig
from ..protocol.errors import EngineDeadError
from ..protocol.outputs import EngineCoreOutputs, UtilityOutput
from ..protocol.requests import EngineCoreRequest, EngineCoreRequestType, UtilityRequest
from .base import AsyncEngineCoreClient
from .failures import utility_result
from .link import LAST_OUTPUTS_WAIT_MS, CoreLink

DETACH_WAIT = 1.0  # seconds a shutdown in another thread waits for the event loop to let go of the sockets


class AsyncMPClient(AsyncEngineCoreClient):
    """The event loop itself watches the output socket and the core's process; there is no thread and no task.

    The first call ties the client to its event loop. A call from another one moves it there if the first has stopped,
    and raises RuntimeError while that runs.
    """

    def __init__(self, vllm_config: VllmConfig, executor_class: str, log_stats: bool) -> None:
        self._link = CoreLink(vllm_config, executor_class, log_stats)
        self._inbox = _Inbox(self._link)
        self._finalizer = weakref.finalize(self, self._inbox.close, 0.0)
        self.vllm_config = self._link.vllm_config
        self._call_ids = itertools.count()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._inbox.next_outputs()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._inbox.attach()
        self._link.send(EngineCoreRequestType.ADD, request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self._link.check_death():
            self._inbox.attach()
            with contextlib.suppress(EngineDeadError):
                self._link.send(EngineCoreRequestType.ABORT, request_ids)

    def call_utility(self, method: str, *args: object) -> Awaitable[Any]:
        return self._call_utility(method, args)

    async def _call_utility(self, method: str, args: tuple[object, ...]) -> Any:
        call_id = next(self._call_ids)
        answer = self._inbox.expect_answer(call_id)
        try:
            self._link.send(EngineCoreRequestType.UTILITY, UtilityRequest(0, call_id, method, list(args)))
            return utility_result(await answer)
        finally:
            self._inbox.forget_answer(call_id)

    @property
    def engine_dead(self) -> bool:
        return self._link.check_death()

    def dead_error(self) -> EngineDeadError:
        return self._link.dead_error()

    def shutdown(self, timeout: float | None = None) -> None:
        """Callable from any thread, with or without a loop. What the core finished meanwhile is still handed out by
        `get_output_async`; then waiters wake with EngineDeadError.
        """
        self._inbox.close(self.vllm_config.parallel_config.shutdown_timeout if timeout is None else timeout)
        self._finalizer.detach()


class _Inbox:
    """Receives in the event loop without keeping the client alive. All but `close` belongs to the loop's thread."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._answers: dict[int, asyncio.Future[UtilityOutput]] = {}

    async def next_outputs(self) -> EngineCoreOutputs:
        while not self._outputs:
            self._link.ensure_alive()
            self.attach()
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self._outputs.popleft()

    def expect_answer(self, call_id: int) -> asyncio.Future[UtilityOutput]:
        self._link.ensure_alive()
        self.attach()
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        return answer

    def forget_answer(self, call_id: int) -> None:
        self._answers.pop(call_id, None)

    def attach(self) -> None:
        """Receives in the running event loop from now on."""
        loop = asyncio.get_running_loop()
        if loop is self._loop or self._link.dead_cause is not None:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("the engine is in use in another event loop, which is still running")
        self._detach()
        self._waiters.clear()
        self._answers.clear()
        self._loop = loop
        loop.add_reader(self._link.output_fd, self._receive)
        loop.add_reader(self._link.process.channel.fileno(), self._on_channel_readable)
        loop.call_soon(self._receive)  # the socket announces only what comes from now on

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._link.output_fd)
            self._loop.remove_reader(self._link.process.channel.fileno())
        self._loop = None

    def _receive(self) -> None:
        """Takes all that is there: ZMQ announces a message once, not as long as it is there."""
        while (received := self._link.receive_nowait()) is not None:
            self._sort(received)
        if self._link.dead_cause is not None:
            self._fail_waiters()

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

    def _fail_waiters(self) -> None:
        self._wake_waiters()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._link.dead_error())

    def _on_channel_readable(self) -> None:
        if not self._link.process.poll_death() or self._loop is None:
            return
        self._loop.remove_reader(self._link.process.channel.fileno())
        self._loop.call_later(LAST_OUTPUTS_WAIT_MS / 1000, self._bury)

    def _bury(self) -> None:
        self._receive()
        self._link.mark_dead()
        self._fail_waiters()

    def close(self, drain_timeout: float) -> None:
        """Ends the core; in any thread."""
        if self._link.is_fork:
            return
        self._outputs.extend(self._link.stop(drain_timeout))
        self._in_loop(self._let_go)
        self._link.release()

    def _let_go(self) -> None:
        self._detach()
        self._fail_waiters()

    def _in_loop(self, action: Callable[[], None]) -> None:
        """Runs `action` in the loop's thread if the loop runs in another one, else here."""
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
