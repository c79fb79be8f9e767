"""What a route is."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """A route. `generates`: it is refused while the server drains or is at its limit. `body`: what it reads."""

    path: str
    handler: Handler
    methods: tuple[str, ...] = ("POST",)
    generates: bool = False
    admin: bool = False
    page: bool = False
    body: type[msgspec.Struct] | None = None
