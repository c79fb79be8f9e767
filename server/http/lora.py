"""LoRA adapters come and go, with --enable-admin only. One that is loaded is asked for as a model of its name."""

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError
from .responses import read_body
from .server import Server, server_of


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """`model`: whose adapter it is. `load_inplace`: in place of one of that name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    model: str | None = None


async def load_adapter(request: Request) -> Response:
    body = await read_body(request, LoadAdapterRequest)
    server = server_of(request)
    _require_one_process(server)
    if not body.lora_name or not body.lora_path:
        field = "lora_path" if body.lora_name else "lora_name"
        raise ApiError(f"{field} must not be empty", param=field)
    path = _within(server.options.lora_root, body.lora_path)
    async with server.models.use(body.model) as model:
        await model.load_adapter(body.lora_name, str(path), body.load_inplace)
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    body = await read_body(request, UnloadAdapterRequest)
    server = server_of(request)
    _require_one_process(server)
    async with server.models.use(body.model) as model:
        await model.unload_adapter(body.lora_name)
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _require_one_process(server: Server) -> None:
    if server.options.api_server_count > 1:
        raise ApiError("adapters cannot come or go while several processes serve the API; use --lora-modules")


def _within(root: str | None, given: str) -> Path:
    """The place that `given` names, below the root. Raises ApiError for any other, and where nothing is there."""
    if root is None:
        raise ApiError("the server opens no paths of clients; start it with --lora-root DIR", 403, param="lora_path")
    folder = Path(root).expanduser().resolve()
    try:
        path = (folder / given).resolve()
        found = path.is_relative_to(folder)
        if found and not path.exists():
            raise ApiError(f"there is no adapter {given!r}", 404, param="lora_path")
    except (OSError, RuntimeError, ValueError):  # loops of links, NUL characters, names too long
        found = False
    if not found:
        raise ApiError("lora_path must lie in the folder of --lora-root", 403, param="lora_path")
    return path
