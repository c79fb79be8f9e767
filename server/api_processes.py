"""`--api-server-count`: more processes that serve the same engine's API, on the same listening socket.

The first process starts the engine's core and is one of the servers; the others join the core as clients of their own.
What they need, secrets among it, comes to them through a pipe, which also tells them when the first has died. SIGTERM
has them drain, a second signal ends them; the first passes on its own signals.
"""

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..client.connection import ClientAddresses
from ..engine.async_llm import AsyncLLM
from ..engine.engine_args import AsyncEngineArgs
from ..protocol.config import VllmConfig
from .http.peers import Peers
from .models import ServedModel
from .serve_options import ServeOptions

END_SECONDS = 15.0
"""What processes get to end in after they were told a second time, the 5 s for their open connections included."""


@dataclass(frozen=True)
class Joining:
    """All that a process needs to join: pickled by the first, for it alone."""

    options: ServeOptions
    config: VllmConfig
    log_stats: bool
    log_requests: bool
    names: list[str]
    addresses: ClientAddresses
    peers: Peers
    listener: int


class ApiProcesses:
    """The processes beside this one: none before `start`. Used from one event loop."""

    def __init__(self, options: ServeOptions, listener: socket.socket) -> None:
        self._options = options
        self._listener = listener
        self._processes: list[asyncio.subprocess.Process] = []
        self.peers: Peers | None = None
        if options.api_server_count > 1:
            self.peers = Peers(Path(tempfile.mkdtemp(prefix="corespan-api-")), 0, options.api_server_count)

    async def start(self, model: ServedModel, engine_args: AsyncEngineArgs) -> None:
        """Returns when all of them serve. Raises OSError where one does not."""
        starting = [self._start(index, model, engine_args) for index in range(1, self._options.api_server_count)]
        await asyncio.gather(*starting)

    async def _start(self, index: int, model: ServedModel, engine_args: AsyncEngineArgs) -> None:
        assert self.peers is not None
        joining = Joining(
            options=self._options,
            config=model.engine.vllm_config,
            log_stats=not engine_args.disable_log_stats,
            log_requests=engine_args.enable_log_requests,
            names=model.names,
            addresses=model.engine.client_addresses(index),
            peers=self.peers.seen_by(index),
            listener=self._listener.fileno(),
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"{__package__}.api_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[joining.listener],
            start_new_session=True,  # Ctrl-C is for the first process, which passes it on
        )
        self._processes.append(process)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(pickle.dumps(joining))
        await process.stdin.drain()
        if await process.stdout.readline() != READY:
            raise OSError(f"API process {index} ended with status {await process.wait()}; its messages are above")

    @property
    def running(self) -> bool:
        return any(process.returncode is None for process in self._processes)

    def ended_with(self) -> int | None:
        """The status of one that has ended, if any has."""
        return next((each.returncode for each in self._processes if each.returncode is not None), None)

    def terminate(self, signal_number: int = signal.SIGTERM) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal_number)

    async def end(self) -> None:
        """Returns when all have ended; what does not after another signal is killed."""
        self.terminate(signal.SIGINT)  # a second SIGTERM would be lost on a process that has not yet taken the first
        ending = asyncio.gather(*(process.wait() for process in self._processes))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ending), END_SECONDS)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await ending

    async def close(self) -> None:
        if self._processes:
            await self.end()
        if self.peers is not None:
            shutil.rmtree(self.peers.folder, ignore_errors=True)


READY = b"ready\n"


def receive_joining(pipe: BinaryIO) -> Joining:
    """In a process that joins: what the first has sent. This process ends when the first does, and so the pipe."""
    joining = pickle.load(pipe)
    assert isinstance(joining, Joining)

    def follow() -> None:
        pipe.read()
        os._exit(1)

    threading.Thread(target=follow, name="corespan-follow", daemon=True).start()
    return joining


def join(joining: Joining) -> ServedModel:
    """The model, over the core that the first process started."""
    engine = AsyncLLM(
        joining.config,
        log_stats=joining.log_stats,
        log_requests=joining.log_requests,
        client_addresses=joining.addresses,
        client_count=joining.options.api_server_count,
        client_index=joining.addresses.client_index,
    )
    return ServedModel(engine, joining.names, joining.options.chat_settings())
