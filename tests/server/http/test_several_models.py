"""Two engines behind one server, one of them loaded at a time, over HTTP."""

import httpx
from bridge import FAKE_EXECUTOR, fake_config
from deadlines import DEADLINE
from http_server import ServerThread

from corespan import AsyncLLM
from corespan.server.model_pool import ModelPool
from corespan.server.models import ServedModel
from corespan.server.serve_options import ServeOptions


def load(name: str) -> ServedModel:
    if name == "broken":
        raise FileNotFoundError("/secret/folder")
    return ServedModel(AsyncLLM(fake_config(), FAKE_EXECUTOR, log_stats=True), [name])


def test_models_take_turns_and_a_broken_one_disturbs_none() -> None:
    thread = ServerThread(ServeOptions(disable_uvicorn_access_log=True))
    try:
        thread.serve(ModelPool(["a", "b", "broken"], load, max_loaded=1, max_asleep=1))
        with httpx.Client(base_url=thread.url, timeout=DEADLINE) as client:

            def ask(name: str, stream: bool = False) -> httpx.Response:
                body = {"model": name, "prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "stream": stream}
                return client.post("/v1/completions", json={**body, "return_token_ids": True})

            def states() -> dict[str, str]:
                return {each["id"]: each["state"] for each in client.get("/v1/models").json()["data"]}

            assert client.get("/health").status_code == 200
            for name, other, state in (("a", "b", "unloaded"), ("b", "a", "asleep"), ("a", "b", "asleep")):
                assert ask(name).json()["model"] == name
                assert states() == {name: "loaded", other: state, "broken": "unloaded"}
            for stream in (False, True):
                failed = ask("broken", stream)
                assert failed.status_code == 500 and "/secret" not in failed.text and "'broken'" in failed.text
            assert ask("none").status_code == 404
            assert ask("b", stream=True).text.endswith("data: [DONE]\n\n")
            assert client.get("/metrics").status_code == 200
            assert client.get("/health").status_code == 200
            assert thread.server.num_requests == 0
    finally:
        thread.close()
