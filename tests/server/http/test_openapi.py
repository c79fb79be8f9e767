"""The OpenAPI document: every route, every body, names that resolve."""

import json
import re

import httpx
from http_server import ServerThread

from corespan.server.http.app import ENDPOINTS


def test_document_holds_every_route_and_body(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()

    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    served = {
        (re.sub(r":\w+}", "}", each.path), method) for each in ENDPOINTS if not each.page for method in each.methods
    }
    assert described == served
    for reference in re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(document)):
        assert reference in document["components"]["schemas"]
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat == {"$ref": "#/components/schemas/ChatCompletionRequest"}


def test_document_is_there_before_the_model() -> None:
    thread = ServerThread()
    try:
        assert httpx.get(f"{thread.url}/openapi.json").json()["openapi"] == "3.1.0"
    finally:
        thread.close()
