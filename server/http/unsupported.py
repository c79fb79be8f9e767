"""Routes of other engines that the server does not have: LoRA adapters. They answer 400 and say so, where a 404 would
read as a wrong address and a 501 would have clients try again.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError, model_not_found
from .responses import read_body
from .server import server_of

LORA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class NamedModel(msgspec.Struct, kw_only=True):
    """Of a body that will be refused, whose model it is for."""

    model: str | None = None


async def lora(request: Request) -> Response:
    """Refused: the server loads no adapters; the engine's Python API does."""
    await _model_of(request)
    raise ApiError("the server does not load LoRA adapters; in Python, LLM and AsyncLLM do", param="lora_name")


async def _model_of(request: Request) -> str:
    """The name of the model that is meant, which need not be loaded. Raises ApiError where there is none."""
    body = await read_body(request, NamedModel)
    known = [str(entry["id"]) for entry in server_of(request).models.listing()]
    if body.model and body.model not in known:
        raise model_not_found(body.model, known)
    return body.model or known[0]
