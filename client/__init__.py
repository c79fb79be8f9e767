"""The span between shell and core: clients, and the processes, sockets and restarts behind them."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocol.config import VllmConfig
    from .async_client import AsyncMPClient
    from .base import SyncEngineCoreClient
    from .connection import ClientAddresses, Connection


def make_client(
    multiprocess_mode: bool, vllm_config: "VllmConfig", executor_class: str, log_stats: bool
) -> "SyncEngineCoreClient":
    """A running core, in a process of its own or in this one, and the client for callers that may block.
    `executor_class` is "package.module:Class".

    Raises what the core's start raised, and TimeoutError when it took longer than VLLM_ENGINE_READY_TIMEOUT_S.
    """
    if not multiprocess_mode:
        from .inproc import InprocClient

        return InprocClient(vllm_config, executor_class, log_stats)
    from .sync_client import SyncMPClient

    return SyncMPClient(_connect(vllm_config, executor_class, log_stats, 1, None))


def make_async_client(
    vllm_config: "VllmConfig",
    executor_class: str,
    log_stats: bool,
    client_addresses: "ClientAddresses | None" = None,
    client_count: int = 1,
    client_index: int = 0,
) -> "AsyncMPClient":
    """The same for asyncio, with the core in a process of its own.

    Of `client_count` clients of one core, the first (index 0) starts it; the others join with the addresses that the
    first gives them. Raises ValueError, too, where addresses and index do not fit or the core is to be both shared and
    restarted.
    """
    from .async_client import AsyncMPClient

    _check_index(client_addresses, client_count, client_index)
    return AsyncMPClient(_connect(vllm_config, executor_class, log_stats, client_count, client_addresses))


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
