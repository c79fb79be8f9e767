"""Routes for what the models cannot do: refused in a way that clients neither repeat nor misread."""

import httpx
import pytest

from corespan.server.http.unsupported import LORA, POOLING


@pytest.mark.parametrize("path", POOLING)
def test_pooling_is_refused_by_the_models_name(http: httpx.Client, path: str) -> None:
    refused = http.post(path, json={"model": "tiny", "input": "text"})

    assert refused.status_code == 400
    assert f"'tiny' does not support the {POOLING[path]} API" in refused.json()["error"]["message"]
    assert http.post(path, json={"model": "other", "input": "text"}).status_code == 404


@pytest.mark.parametrize("path", LORA)
def test_adapters_are_refused(http: httpx.Client, path: str) -> None:
    refused = http.post(path, json={"lora_name": "a", "lora_path": "/etc"})

    assert refused.status_code == 400 and refused.json()["error"]["param"] == "lora_name"
