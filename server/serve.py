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
from collections.abc import Awaitable, Callable, Iterator, Sequence

import uvicorn

from ..engine.async_llm import AsyncLLM
from ..engine.engine_args import AsyncEngineArgs, UsageContext
from .api_processes import ApiProcesses
from .http.app import build_app
from .http.server import Server
from .listening import address_of, bind
from .model_pool import ModelPool
from .models import ModelHost, ServedModel, SingleModel
from .serve_options import ServeOptions
from .service_manager import notify

logger = logging.getLogger("corespan.server")

ENGINE_WATCH_SECONDS = 1.0


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(options: ServeOptions, engine_args: Sequence[AsyncEngineArgs]) -> int:
    """Serves the models until told to stop. The exit status: 0, or 1 where the engine died or never came up."""
    listener = bind(options)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_serve(options, engine_args, listener))
    finally:
        listener.close()
        if options.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(options.uds)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    return uvicorn.Config(app=None, loop="uvloop").get_loop_factory()  # type: ignore[arg-type]


async def _serve(options: ServeOptions, engine_args: Sequence[AsyncEngineArgs], listener: socket.socket) -> int:
    processes = ApiProcesses(options, listener)
    server = Server(options, processes.peers)

    async def begin(models: ModelHost) -> None:
        if options.api_server_count > 1:
            (model,) = models.loaded()
            await processes.start(model, engine_args[0])
        logger.info("%s", ready_line(models, options, address_of(options, listener)))
        notify("READY=1")

    try:
        return await serve_models(server, listener, lambda: _model_host(options, engine_args), begin, processes)
    finally:
        await processes.close()


async def serve_models(
    server: Server,
    listener: socket.socket,
    load: Callable[[], Awaitable[ModelHost]],
    begin: Callable[[ModelHost], Awaitable[None]],
    processes: ApiProcesses | None = None,
) -> int:
    """Answers, first that there is no model yet; returns the exit status. `begin` is called when the model is there.

    `processes`, other servers of the same engine, are told to end when this one is, and ended before the engine.
    """
    http = _Uvicorn(uvicorn_config(server.options, server))
    stop = _StopSignals()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    peers = server.peers
    telling = None if peers is None else await peers.listen(server.told_to_peers())
    try:
        loading = asyncio.ensure_future(load())
        stopping = asyncio.create_task(stop.first.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            os._exit(130)  # the thread cannot be interrupted; the core follows its parent
        models = loading.result()
        try:
            server.ready(models)
            await begin(models)
            dead = await _until_stopped_or_dead(stop, models, processes)
            await _drain(server, stop, dead, processes)
        finally:
            await models.close()
        return 1 if dead else 0
    finally:
        if telling is not None:
            telling.close()
        http.should_exit = True
        await serving


async def _model_host(options: ServeOptions, engine_args: Sequence[AsyncEngineArgs]) -> ModelHost:
    """One model, loaded; or several that are loaded when they are asked for."""
    if options.lora_modules and not all(each.enable_lora for each in engine_args):
        raise ValueError("--lora-modules needs --enable-lora")
    if len(engine_args) == 1:
        return await with_adapters(await asyncio.to_thread(_load, options, engine_args[0]), options)
    if options.lora_modules:
        raise ValueError("--lora-modules goes with one model")
    by_name = {str(each.served_model_name): each for each in engine_args}

    def load(name: str) -> ServedModel:
        return _load(options, by_name[name])

    return ModelPool(
        list(by_name), load, options.max_loaded_models, options.model_keep_alive, options.max_sleeping_models
    )


async def with_adapters(model: ServedModel, options: ServeOptions) -> SingleModel:
    """The model once its adapters are read. Closes it, and raises ValueError, for one that cannot be used."""
    try:
        for name, path in options.adapters().items():
            await model.load_adapter(name, path)
    except BaseException:
        await asyncio.to_thread(model.close)
        raise
    return SingleModel(model)


def _load(options: ServeOptions, engine_args: AsyncEngineArgs) -> ServedModel:
    engine = AsyncLLM(
        engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER),
        log_stats=not engine_args.disable_log_stats,
        log_requests=engine_args.enable_log_requests,
        client_count=options.api_server_count,
    )
    names = options.served_model_name or [str(engine_args.served_model_name)]
    return ServedModel(engine, names, options.chat_settings())


def ready_line(models: ModelHost, options: ServeOptions, address: str) -> str:
    """What is served, where, and what its requests start from."""
    names = ", ".join(str(entry["id"]) for entry in models.listing())
    if not isinstance(models, SingleModel):
        return f"Serving {names} on {address}: loaded on demand, {options.max_loaded_models} at a time"
    model, defaults = models.model, models.model.defaults
    line = (
        f"Serving {names} on {address}: {model.max_model_len} tokens of context, "
        f"temperature {defaults.temperature:g}, top_p {defaults.top_p:g}, top_k {defaults.top_k}"
    )
    parsers = {"tools": model.chat.tool_parser, "reasoning": model.chat.reasoning_parser}
    return line + "".join(f", {what} by {parser}" for what, parser in parsers.items() if parser is not None)


async def _until_stopped_or_dead(stop: "_StopSignals", models: ModelHost, processes: ApiProcesses | None) -> bool:
    """Whether it was a death, the engine's or another server's, that ended the wait."""
    while not stop.first.is_set():
        if (failure := models.failure()) is not None:
            logger.error("The engine is down: %s", failure)
            return True
        if processes is not None and (status := processes.ended_with()) is not None:
            logger.error("An API process has ended with status %d", status)
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.first.wait(), ENGINE_WATCH_SECONDS)
    return False


async def _drain(server: Server, stop: "_StopSignals", dead: bool, processes: ApiProcesses | None) -> None:
    """Running requests finish, or are cut off at the time limit or the second signal."""
    server.phase = "dead" if dead else "draining"
    notify("STOPPING=1")

    def is_busy() -> bool:
        return bool(server.num_requests) or (processes is not None and processes.running)

    if processes is not None:
        processes.terminate()
    if not dead and is_busy():
        logger.info(
            "Shutting down: %d requests get %g s to finish", server.num_requests, server.options.shutdown_timeout
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(server.options.shutdown_timeout):
                while is_busy() and not stop.second.is_set():
                    await asyncio.sleep(0.05)
    if processes is not None:
        await processes.end()


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


def uvicorn_config(options: ServeOptions, server: Server) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(server),
        http="httptools",
        lifespan="off",
        access_log=False,
        server_header=False,
        log_level=options.uvicorn_log_level,
        log_config=None,
        timeout_keep_alive=options.keep_alive_timeout,
        timeout_graceful_shutdown=5,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
    )
