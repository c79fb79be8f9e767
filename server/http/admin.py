"""The engine's controls over HTTP, served with --enable-admin only."""

from contextlib import AbstractAsyncContextManager
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from ...protocol.pausing import PauseMode
from ..models import ServedModel
from .errors import ApiError
from .responses import json_response
from .server import server_of


def _model(request: Request) -> AbstractAsyncContextManager[ServedModel]:
    return server_of(request).models.use(request.query_params.get("model"))


def _flag(request: Request, name: str, default: bool) -> bool:
    given = request.query_params.get(name)
    if given is None:
        return default
    if given.lower() not in ("true", "false", "1", "0"):
        raise ApiError(f"{name} must be true or false, got {given!r}", param=name)
    return given.lower() in ("true", "1")


def _mode(request: Request) -> PauseMode:
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise ApiError(f"mode must be abort, wait or keep, got {mode!r}", param="mode")
    return cast(PauseMode, mode)


async def sleep(request: Request) -> Response:
    level = request.query_params.get("level", "1")
    if level not in ("0", "1", "2"):
        raise ApiError(f"level must be 0, 1 or 2, got {level!r}", param="level")
    async with _model(request) as model:
        await model.engine.sleep(int(level), _mode(request))
    return Response(status_code=200)


async def wake_up(request: Request) -> Response:
    tags = request.query_params.getlist("tags") or None
    async with _model(request) as model:
        await model.engine.wake_up(tags)
    return Response(status_code=200)


async def is_sleeping(request: Request) -> Response:
    async with _model(request) as model:
        return json_response({"is_sleeping": await model.engine.is_sleeping()})


async def pause(request: Request) -> Response:
    async with _model(request) as model:
        await model.engine.pause_generation(_mode(request), _flag(request, "clear_cache", True))
    return json_response({"status": "paused"})


async def resume(request: Request) -> Response:
    async with _model(request) as model:
        await model.engine.resume_generation()
    return json_response({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    async with _model(request) as model:
        return json_response({"is_paused": await model.engine.is_paused()})


async def reset_prefix_cache(request: Request) -> Response:
    running = _flag(request, "reset_running_requests", False)
    async with _model(request) as model:
        return json_response({"success": bool(await model.engine.reset_prefix_cache(running))})


async def start_profile(request: Request) -> Response:
    async with _model(request) as model:
        await model.engine.start_profile()
    return Response(status_code=200)


async def stop_profile(request: Request) -> Response:
    async with _model(request) as model:
        await model.engine.stop_profile()
    return Response(status_code=200)
