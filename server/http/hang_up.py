"""Noticing that a client has gone, and ending the work that was for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up before its answer was ready; there is nobody to tell."""


async def hung_up(receive: Receive) -> None:
    """Returns when the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_hung_up(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up; then ClientGone is raised."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(hung_up(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
