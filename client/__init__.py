"""The span between shell and core: clients, and the processes, sockets and restarts behind them."""

import functools
from typing import TYPE_CHECKING, Literal, overload

if TYPE_CHECKING:
    from ..protocol.config import VllmConfig
    from .async_client import AsyncMPClient
    from .base import EngineCoreClient, SyncEngineCoreClient
    from .connection import ClientAddresses, Connection


@overload
def make_client(
    multiprocess_mode: bool,
    asyncio_mode: Literal[False],
    vllm_config: "VllmConfig",
    executor_class: str,
    log_stats: bool,
) -> "SyncEngineCoreClient": ...


@overload
def make_client(
    multiprocess_mode: bool,
    asyncio_mode: Literal[True],
    vllm_config: "VllmConfig",
    executor_class: str,
    log_stats: bool,
    client_addresses: "ClientAddresses | None" = None,
    client_count: int = 1,
    client_index: int = 0,
) -> "AsyncMPClient": ...


def make_client(
    multiprocess_mode: bool,
    asyncio_mode: bool,
    vllm_config: "VllmConfig",
    executor_class: str,
    log_stats: bool,
    client_addresses: "ClientAddresses | None" = None,
    client_count: int = 1,
    client_index: int = 0,
) -> "EngineCoreClient":
    """A running core and the client that fits. `executor_class` is "package.module:Class".

    Of `client_count` asyncio clients of one core, the first (index 0) starts it; the others join with the addresses
    that the first gives them.

    Raises what the core's start raised, TimeoutError when it took longer than VLLM_ENGINE_READY_TIMEOUT_S,
    NotImplementedError for asyncio in process, and ValueError where addresses and index do not fit or the core is to be
    both shared and restarted.
    """
    if not multiprocess_mode:
        if asyncio_mode:
            raise NotImplementedError("asyncio needs the core in a process of its own: multiprocess_mode=True")
        from .inproc import InprocClient

        return InprocClient(vllm_config, executor_class, log_stats)
    _check_index(client_addresses, client_count, client_index)
    connection = _connect(vllm_config, executor_class, log_stats, client_count, client_addresses)
    if asyncio_mode:
        from .async_client import AsyncMPClient

        return AsyncMPClient(connection)
    from .sync_client import SyncMPClient

    return SyncMPClient(connection)


def _check_index(client_addresses: "ClientAddresses | None", client_count: int, client_index: int) -> None:
    if not 0 <= client_index < client_count:
        raise ValueError(f"client_index is {client_index}; of {client_count} clients it must be 0..{client_count - 1}")
    if (client_addresses is None) != (client_index == 0):
        raise ValueError(f"client_index is {client_index}: the first client starts the core, all others need addresses")
    if client_addresses is not None and client_addresses.client_index != client_index:
        raise ValueError(f"client_index is {client_index}, but the addresses are for {client_addresses.client_index}")


def _connect(
    vllm_config: "VllmConfig",
    executor_class: str,
    log_stats: bool,
    client_count: int,
    client_addresses: "ClientAddresses | None",
) -> "Connection":
    from .connection import CoreConnection

    restarts = vllm_config.parallel_config.engine_restart
    if not restarts:
        return CoreConnection(vllm_config, executor_class, log_stats, client_count, client_addresses)
    if client_count > 1:  # no client knows what the others have left unfinished
        raise ValueError(
            f"engine_restart is {restarts}, client_count {client_count}: a core that several clients share is not "
            "restarted; use engine_restart=0 or client_count=1"
        )
    from .restart import RestartingConnection

    start = functools.partial(CoreConnection, vllm_config, executor_class, log_stats)
    return RestartingConnection(start, vllm_config, restarts)
