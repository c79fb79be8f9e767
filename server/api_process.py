"""One of several API processes: `python -m corespan.server.api_process`, started by `api_processes` alone."""

import asyncio
import logging
import socket
import sys

from .api_processes import READY, Joining, join, receive_joining
from .http.server import Server
from .models import ModelHost
from .serve import loop_factory, serve_models, with_adapters


async def _serve(joining: Joining) -> int:
    server = Server(joining.options, joining.peers)

    async def load() -> ModelHost:
        return await with_adapters(await asyncio.to_thread(join, joining), joining.options)

    async def begin(models: ModelHost) -> None:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()

    return await serve_models(server, socket.socket(fileno=joining.listener), load, begin)


def main() -> int:
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    joining = receive_joining(sys.stdin.buffer)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(joining))


if __name__ == "__main__":
    sys.exit(main())
