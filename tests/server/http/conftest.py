"""One server over the tiny model for all tests of the HTTP API, and clients of it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from clients import SMALL_ENGINE
from deadlines import DEADLINE
from http_server import ServerThread, serve_engine
from scripted_model import Scripted, serve_scripted

from corespan.server.serve_options import ServeOptions


@pytest.fixture(scope="session")
def tiny_server(tiny_llama_dir: str) -> Iterator[ServerThread]:
    options = ServeOptions(enable_admin=True, enable_tokenizer_info_endpoint=True, disable_uvicorn_access_log=True)
    thread = serve_engine(options, ["tiny", "alias/of-it"], model=tiny_llama_dir, **SMALL_ENGINE)
    yield thread
    thread.close()


@pytest.fixture
def http(tiny_server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=DEADLINE) as client:
        yield client


@pytest.fixture(scope="session")
def openai_client(tiny_server: ServerThread) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="EMPTY", max_retries=0)


@pytest.fixture(scope="session")
def scripted(tiny_server: ServerThread) -> Iterator[Scripted]:
    serving = serve_scripted(tiny_server.server.models.loaded()[0].engine)
    yield serving
    serving.thread.close()
