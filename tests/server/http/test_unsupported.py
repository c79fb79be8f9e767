"""Routes for what the server does not do: refused in a way that clients neither repeat nor misread."""

import httpx
import pytest

from corespan.server.http.unsupported import LORA


@pytest.mark.parametrize("path", LORA)
def test_adapters_are_refused(http: httpx.Client, path: str) -> None:
    refused = http.post(path, json={"lora_name": "a", "lora_path": "/etc"})

    assert refused.status_code == 400 and refused.json()["error"]["param"] == "lora_name"
