"""A server in a thread of this process, on a real port, in front of an `AsyncLLM`."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn
from bridge import FAKE_EXECUTOR, fake_config
from clients import LoopThread
from deadlines import DEADLINE

from corespan import AsyncEngineArgs, AsyncLLM
from corespan.server.http.server import Server
from corespan.server.models import ModelHost, ServedModel, SingleModel
from corespan.server.serve import uvicorn_config
from corespan.server.serve_options import ServeOptions


class ServerThread:
    """`url` is the server's address; `server` its state, `call` runs a coroutine on its loop."""

    def __init__(self, options: ServeOptions | None = None) -> None:
        self.server = Server(options or ServeOptions(disable_uvicorn_access_log=True))
        self.loop = LoopThread()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._http = uvicorn.Server(uvicorn_config(self.server.options, self.server))
        self._serving = self.loop.start(self._http._serve(sockets=[self.listener]))
        scheme = "https" if self.server.options.ssl_certfile else "http"
        self.url = f"{scheme}://127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self, host: ModelHost) -> None:
        self.server.ready(host)

    def close(self) -> None:
        self._http.should_exit = True
        self._serving.result(DEADLINE)
        if self.server._models is not None:
            self.loop.run(self.server.models.close())
        self.loop.close()
        self.listener.close()


def serve_engine(
    options: ServeOptions | None = None, names: Sequence[str] = ("tiny",), **engine_args: Any
) -> ServerThread:
    """A server with one engine of these arguments, ready."""
    thread = ServerThread(options)
    try:
        engine = thread.loop.run(_build(engine_args))
        thread.serve(SingleModel(ServedModel(engine, names, thread.server.options.chat_settings())))
    except BaseException:
        thread.close()
        raise
    return thread


async def _build(engine_args: dict[str, Any]) -> AsyncLLM:
    return await asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(**engine_args))


def serve_fake(options: ServeOptions | None = None, **fake: Any) -> ServerThread:
    """A server over the executor without a model, without a tokenizer: `fake` goes to `fake_config`."""
    thread = ServerThread(options or ServeOptions(disable_uvicorn_access_log=True))
    try:
        engine = AsyncLLM(fake_config(**fake), FAKE_EXECUTOR)
        thread.serve(SingleModel(ServedModel(engine, ["fake"])))
    except BaseException:
        thread.close()
        raise
    return thread
