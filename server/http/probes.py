"""What is asked about the server itself: health, version, load, metrics, and which models there are."""

import asyncio
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from .errors import ApiError, model_not_found
from .responses import json_response
from .server import server_of


async def health(request: Request) -> Response:
    """200 when requests are taken, 503 while loading, draining or without an engine."""
    server = server_of(request)
    ready = server.phase == "ready" and server.models.failure() is None
    return Response(status_code=200 if ready else 503)


async def live(request: Request) -> Response:
    return Response(status_code=200)


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def load(request: Request) -> Response:
    return json_response({"server_load": server_of(request).num_requests})


async def metrics(request: Request) -> Response:
    """Prometheus' text: the engine's figures and the HTTP server's."""
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
    except ImportError:
        raise ApiError("metrics need prometheus_client: pip install 'corespan[metrics]'", 404) from None
    registries = [REGISTRY, server_of(request).metrics.registry]

    def text() -> bytes:
        return b"".join(generate_latest(registry) for registry in registries)

    return Response(await asyncio.to_thread(text), media_type=CONTENT_TYPE_LATEST)


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": server_of(request).models.listing()})


async def retrieve_model(request: Request) -> Response:
    name = unquote(request.path_params["name"])
    entries = server_of(request).models.listing()
    for entry in entries:
        if entry["id"] == name:
            return json_response(entry)
    raise model_not_found(name, [entry["id"] for entry in entries])
