"""`/openapi.json`: the document of every route, out of `ENDPOINTS` and the bodies' own types."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from .endpoint import Endpoint
from .responses import json_response

_ERROR = {
    "description": "An error, as an object that says which field is at fault",
    "content": {"application/json": {"schema": {"type": "object"}}},
}
_ANSWER = {"200": {"description": "The answer"}, "default": _ERROR}


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes. The page's files are left out."""
    served = [endpoint for endpoint in endpoints if not endpoint.page]
    bodies = list(dict.fromkeys(endpoint.body for endpoint in served if endpoint.body is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in served:
        operations = paths.setdefault(re.sub(r":\w+}", "}", endpoint.path), {})
        for method in endpoint.methods:
            operations[method.lower()] = _operation(endpoint, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "corespan", "version": __version__},
        "paths": paths,
        "security": [{"key": []}],
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    description = (endpoint.handler.__doc__ or "").strip().partition("\n")[0]
    operation: dict[str, Any] = {"summary": description or endpoint.handler.__name__, "responses": _ANSWER}
    names = re.findall(r"{(\w+)", endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.body is not None:
        content = {"application/json": {"schema": schema_of[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


async def openapi(request: Request) -> Response:
    return json_response(request.app.state.openapi)
