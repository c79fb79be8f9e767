"""What is asked about the server itself: health, version, load, metrics, and which models there are."""

import asyncio
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from .errors import model_not_found
from .peers import summed_text
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
    server = server_of(request)
    others = [] if server.peers is None else await server.peers.ask("load")
    return json_response({"server_load": server.num_requests + sum(map(int, others))})


async def metrics(request: Request) -> Response:
    """Prometheus' text: the engine's figures and the HTTP server's, of all processes of this server."""
    server = server_of(request)
    text = await asyncio.to_thread(server.metrics_text)
    if server.peers is not None:
        texts = await server.peers.ask("metrics")
        texts.insert(server.peers.index, text)
        text = await asyncio.to_thread(summed_text, texts)
    return Response(text, media_type="text/plain; version=1.0.0; charset=utf-8")


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": server_of(request).models.listing()})


async def retrieve_model(request: Request) -> Response:
    name = unquote(request.path_params["name"])
    entries = server_of(request).models.listing()
    for entry in entries:
        if entry["id"] == name:
            return json_response(entry)
    raise model_not_found(name, [entry["id"] for entry in entries])
