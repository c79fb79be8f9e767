"""`corespan serve`: binds the port, answers from the first moment, loads the model, drains at the end.

The port is bound before the model loads, so a clash is known at once; until the model is there every request but the
probes gets 503. SIGTERM and SIGINT let running requests finish for `--shutdown-timeout` seconds, a second one ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
from collections.abc import Iterator, Sequence

import uvicorn

from ..engine.async_llm import AsyncLLM
from ..engine.engine_args import AsyncEngineArgs, UsageContext
from .http.app import build_app
from .http.server import Server
from .models import ServedModel, SingleModel
from .serve_options import ServeOptions

logger = logging.getLogger("corespan.server")

ENGINE_WATCH_SECONDS = 1.0


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(options: ServeOptions, engine_args: AsyncEngineArgs, names: Sequence[str]) -> int:
    """Serves until told to stop. The exit status: 0, or 1 where the engine died or never came up."""
    listener = bind(options)
    try:
        config = uvicorn.Config(app=None, loop="uvloop")  # type: ignore[arg-type]
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            return runner.run(_serve(options, engine_args, names, listener))
    finally:
        listener.close()
        if options.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(options.uds)


def bind(options: ServeOptions) -> socket.socket:
    """The listening socket. Raises OSError naming the address that is taken."""
    if options.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(options.uds).st_mode):
                os.unlink(options.uds)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(options.uds)
        os.chmod(options.uds, 0o660)
        return listener
    host = options.host or "0.0.0.0"
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, options.port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{options.port}: {error.strerror}") from None
    return listener


async def _serve(
    options: ServeOptions, engine_args: AsyncEngineArgs, names: Sequence[str], listener: socket.socket
) -> int:
    server = Server(options)
    http = _Uvicorn(_uvicorn_config(options, server))
    stop = _StopSignals()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        loading = asyncio.create_task(asyncio.to_thread(_load, options, engine_args, names))
        stopping = asyncio.create_task(stop.first.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            os._exit(130)  # the thread cannot be interrupted; the core follows its parent
        model = loading.result()
        server.ready(SingleModel(model))
        logger.info("Serving %s on %s", ", ".join(model.names), address_of(options, listener))
        try:
            dead = await _until_stopped_or_dead(stop, model)
            await _drain(server, stop, dead)
        finally:
            model.close()
        return 1 if dead else 0
    finally:
        http.should_exit = True
        await serving


def _load(options: ServeOptions, engine_args: AsyncEngineArgs, names: Sequence[str]) -> ServedModel:
    engine = AsyncLLM.from_engine_args(engine_args, UsageContext.OPENAI_API_SERVER)
    return ServedModel(engine, names, options.chat_settings())


async def _until_stopped_or_dead(stop: "_StopSignals", model: ServedModel) -> bool:
    """Whether it was the engine's death that ended the wait."""
    while not stop.first.is_set():
        if model.engine.errored:
            logger.error("The engine is down: %s", model.engine.dead_error)
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.first.wait(), ENGINE_WATCH_SECONDS)
    return False


async def _drain(server: Server, stop: "_StopSignals", dead: bool) -> None:
    """Running requests finish, or are cut off at the time limit or the second signal."""
    server.phase = "dead" if dead else "draining"
    if dead or server.num_requests == 0:
        return
    logger.info("Shutting down: %d requests get %g s to finish", server.num_requests, server.options.shutdown_timeout)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(server.options.shutdown_timeout):
            while server.num_requests and not stop.second.is_set():
                await asyncio.sleep(0.05)


class _StopSignals:
    """`first` and `second` are set by SIGINT and SIGTERM; the third ends the process at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        if self.second.is_set():
            os._exit(130)
        (self.second if self.first.is_set() else self.first).set()


def _uvicorn_config(options: ServeOptions, server: Server) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(server),
        http="httptools",
        lifespan="off",
        access_log=False,
        server_header=False,
        log_level=options.uvicorn_log_level,
        log_config=None,
        root_path=options.root_path,
        timeout_keep_alive=options.keep_alive_timeout,
        timeout_graceful_shutdown=5,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
    )


def address_of(options: ServeOptions, listener: socket.socket) -> str:
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"
