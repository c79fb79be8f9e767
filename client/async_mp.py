"""The asyncio client for a core in a process of its own."""

import functools
import itertools
import weakref
from collections.abc import Awaitable
from typing import Any

from ..protocol.config import VllmConfig
from ..protocol.errors import EngineDeadError
from ..protocol.outputs import EngineCoreOutputs
from ..protocol.requests import EngineCoreRequest
from .addresses import ClientAddresses
from .base import AsyncEngineCoreClient
from .failures import utility_result
from .inbox import Inbox
from .link import CoreLink
from .supervisor import Supervisor


class AsyncMPClient(AsyncEngineCoreClient):
    """The event loop itself watches the output socket and the core's process; there is no thread and no task.

    The first call ties the client to its event loop. A call from another one moves it there if the first has stopped,
    and raises RuntimeError while that runs.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: str,
        log_stats: bool,
        client_count: int = 1,
        client_addresses: ClientAddresses | None = None,
    ) -> None:
        """Starts a core for `client_count` clients, or joins the core at `client_addresses`.

        Raises ValueError with `engine_restart`, unless the core is this client's alone: no client knows what the others
        have left unfinished.
        """
        restarts = vllm_config.parallel_config.engine_restart
        if restarts and (client_count > 1 or client_addresses is not None):
            raise ValueError(
                f"engine_restart is {restarts}, client_count {client_count}: a core that several clients share is not "
                "restarted; use engine_restart=0 or client_count=1"
            )
        start = functools.partial(CoreLink, vllm_config, executor_class, log_stats, client_count, client_addresses)
        self._supervisor = Supervisor(start, vllm_config, restarts)
        self._inbox = Inbox(self._supervisor)
        self._finalizer = weakref.finalize(self, self._inbox.close, 0.0)
        self.vllm_config = self._supervisor.link.vllm_config
        self._call_ids = itertools.count()

    def client_addresses(self, client_index: int) -> ClientAddresses:
        """For a further client of this one's core, in whatever process, to be passed to `make_async_mp_client`."""
        return self._supervisor.link.addresses.of_client(client_index)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._inbox.next_outputs()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._inbox.attach()
        self._supervisor.add(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.engine_dead:
            self._inbox.attach()
            self._supervisor.abort(request_ids)

    def call_utility(self, method: str, *args: object) -> Awaitable[Any]:
        return self._call_utility(method, args)

    async def _call_utility(self, method: str, args: tuple[object, ...]) -> Any:
        return utility_result(await self._inbox.call(next(self._call_ids), method, list(args)))

    @property
    def engine_dead(self) -> bool:
        return self._supervisor.dead

    def dead_error(self) -> EngineDeadError:
        return self._supervisor.dead_error()

    def shutdown(self, timeout: float | None = None) -> None:
        """Callable from any thread, with or without a loop. What the core finished meanwhile is still handed out by
        `get_output_async`; then waiters wake with EngineDeadError.
        """
        self._inbox.close(self._drain_seconds(timeout))
        if self._supervisor.link.released:  # else a busy event loop has still to let go of the sockets
            self._finalizer.detach()


def make_async_mp_client(
    vllm_config: VllmConfig,
    executor_class: str,
    log_stats: bool,
    client_addresses: ClientAddresses | None = None,
    client_count: int = 1,
    client_index: int = 0,
) -> AsyncMPClient:
    """One of `client_count` clients of one core. The first (index 0) starts it and gives the others their addresses.

    Raises ValueError when addresses and index do not fit.
    """
    if not 0 <= client_index < client_count:
        raise ValueError(f"client_index is {client_index}; of {client_count} clients it must be 0..{client_count - 1}")
    if (client_addresses is None) != (client_index == 0):
        raise ValueError(f"client_index is {client_index}: the first client starts the core, all others need addresses")
    if client_addresses is not None and client_addresses.client_index != client_index:
        raise ValueError(f"client_index is {client_index}, but the addresses are for {client_addresses.client_index}")
    return AsyncMPClient(vllm_config, executor_class, log_stats, client_count, client_addresses)
