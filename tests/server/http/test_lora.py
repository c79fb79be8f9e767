"""Adapters over HTTP: asked for as models, listed, loaded and unloaded; what cannot be done says why."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import write_adapter
from clients import SMALL_ENGINE
from deadlines import DEADLINE
from http_server import ServerThread, serve_engine

from corespan import AsyncEngineArgs
from corespan.server.serve import _model_host
from corespan.server.serve_options import ServeOptions

QUIET: dict[str, Any] = {"disable_uvicorn_access_log": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for number in (1, 2, 3):
        write_adapter(folder / f"a{number}", seed=number)
    write_adapter(folder / "wide", rank=32)
    return folder


@pytest.fixture(scope="module")
def server(root: Path, tiny_llama_dir: str) -> Iterator[ServerThread]:
    options = ServeOptions(enable_admin=True, lora_root=str(root), **QUIET)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}
    thread = serve_engine(options, ["tiny", "alias"], model=tiny_llama_dir, **lora, **SMALL_ENGINE)
    yield thread
    thread.close()


@pytest.fixture
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=DEADLINE) as client:
        yield client
        for entry in client.get("/v1/models").json()["data"]:
            if entry["parent"]:
                client.post("/v1/unload_lora_adapter", json={"lora_name": entry["id"]})


def text(http: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def load(http: httpx.Client, name: str, path: str, expect: int = 200, **more: Any) -> httpx.Response:
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})
    assert answer.status_code == expect, answer.text
    return answer


def test_adapters_are_models_from_when_they_are_loaded(http: httpx.Client, root: Path) -> None:
    plain = text(http, "tiny")
    assert load(http, "one", "a1").text == "Success: LoRA adapter 'one' added successfully."
    load(http, "two", str(root / "a2"))
    entries = {entry["id"]: entry for entry in http.get("/v1/models").json()["data"]}
    assert set(entries) == {"tiny", "alias", "one", "two"}
    assert (entries["one"]["parent"], entries["one"]["root"]) == ("tiny", str(root / "a1"))
    assert entries["tiny"]["parent"] is None and http.get("/v1/models/two").json()["parent"] == "tiny"
    answers = {text(http, name) for name in ("one", "two")} | {plain}
    assert len(answers) == 3 and text(http, "tiny") == plain

    chat = {"model": "one", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert http.post("/v1/chat/completions", json=chat).json()["model"] == "one"
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
    assert gone.text == "Success: LoRA adapter 'one' removed successfully."
    refused = http.post("/v1/completions", json={"model": "one", "prompt": "a"})
    assert refused.status_code == 404 and "'one' does not exist; served here: 'tiny', " in refused.text


def test_an_adapter_is_read_again_in_place(http: httpx.Client, root: Path, tmp_path: Path) -> None:
    load(http, "first", "a1")
    load(http, "changing", "a2")
    second = text(http, "changing")
    assert text(http, "first") != second
    load(http, "changing", "a1", load_inplace=True)
    assert text(http, "changing") == text(http, "first")


def test_what_cannot_be_loaded_says_why(http: httpx.Client, root: Path, tmp_path: Path) -> None:
    load(http, "one", "a1")
    outside = tmp_path / "outside"
    shutil.copytree(root / "a1", outside)
    (root / "link").symlink_to(outside)
    for name, path, status, reason in (
        ("", "a1", 400, "lora_name must not be empty"),
        ("x", "", 400, "lora_path must not be empty"),
        ("one", "a1", 400, "the name 'one' is taken"),
        ("tiny", "a1", 400, "the name 'tiny' is taken"),
        ("x", "nothing", 404, "there is no adapter 'nothing'"),
        ("x", str(outside), 403, "must lie in the folder of --lora-root"),
        ("x", "../outside", 403, "must lie in the folder of --lora-root"),
        ("x", "link", 403, "must lie in the folder of --lora-root"),
        ("x", "a\0b", 403, "must lie in the folder of --lora-root"),
        ("x", "wide", 400, "rank"),
    ):
        error = load(http, name, path, status).json()["error"]
        assert reason in error["message"]
    (root / "link").unlink()
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 404
    assert [entry["id"] for entry in http.get("/v1/models").json()["data"]] == ["tiny", "alias", "one"]


def test_nothing_is_opened_without_a_root_and_nothing_is_served_without_the_controls(
    http: httpx.Client, server: ServerThread, tiny_server: ServerThread
) -> None:
    body = {"lora_name": "a", "lora_path": "/etc"}
    refused = httpx.post(f"{tiny_server.url}/v1/load_lora_adapter", json=body)
    assert refused.status_code == 403 and "--lora-root" in refused.json()["error"]["message"]
    server.server.options.api_server_count = 2
    assert "several processes" in load(http, "one", "a1", 400).text
    server.server.options.api_server_count = 1


async def test_adapters_of_the_command_line_are_there_from_the_start(root: Path, tiny_llama_dir: str) -> None:
    modules = [f"one={root / 'a1'}", f'{{"name": "two", "path": "{root / "a2"}"}}']
    arguments = AsyncEngineArgs(
        tiny_llama_dir, served_model_name="tiny", enable_lora=True, max_cpu_loras=2, **SMALL_ENGINE
    )
    host = await _model_host(ServeOptions(lora_modules=modules), [arguments])
    assert [entry["id"] for entry in host.listing()] == ["tiny", "one", "two"]
    await host.close()
    with pytest.raises(ValueError, match="lacks adapter_config"):
        await _model_host(ServeOptions(lora_modules=[f"one={root}"]), [arguments])
    arguments.enable_lora = False
    with pytest.raises(ValueError, match="--lora-modules needs --enable-lora"):
        await _model_host(ServeOptions(lora_modules=modules), [arguments])


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        (["one"], "takes NAME=PATH"),
        (["=path"], "takes NAME=PATH"),
        (['{"name": "one"}'], "takes NAME=PATH"),
        (["one=a", "one=b"], "the name 'one' is taken"),
        (["tiny=a"], "the name 'tiny' is taken"),
    ],
)
def test_entries_of_the_command_line_are_checked(modules: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ServeOptions(lora_modules=modules, served_model_name=["tiny"])
