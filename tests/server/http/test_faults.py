"""Engines that fail, clients that leave or do not read, more requests than are let in: what HTTP says of each."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from deadlines import DEADLINE
from fake_executor import FAIL_REQUEST, KILL, RAISE, RAISE_LATER
from http_server import ServerThread, serve_fake

from corespan.server.serve_options import ServeOptions

BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "seed": 1}
ENDLESS = {**BODY, "max_tokens": 100_000, "stream": True}


@contextlib.contextmanager
def serving(options: ServeOptions | None = None, **fake: Any) -> Iterator[tuple[ServerThread, httpx.Client]]:
    thread = serve_fake(options, **fake)
    try:
        with httpx.Client(base_url=thread.url, timeout=DEADLINE) as client:
            yield thread, client
    finally:
        thread.close()


@pytest.fixture(scope="module")
def roomy() -> Iterator[ServerThread]:
    """Requests go on for as long as a test wants, one at a time; the next waits."""
    thread = serve_fake(max_model_len=200_000, max_num_seqs=1, num_gpu_blocks_override=20_000, step_seconds=0.001)
    yield thread
    thread.close()


def core(thread: ServerThread, method: str, *arguments: object) -> Any:
    async def call() -> Any:
        return await thread.server.models.loaded()[0].engine.engine_core.call_utility(method, *arguments)

    return thread.loop.run(call())


def until_counts(thread: ServerThread, running: int, waiting: int) -> None:
    """Each look is a message to the core and back."""
    deadline = time.monotonic() + DEADLINE
    while list(core(thread, "get_request_counts")) != [running, waiting]:
        assert time.monotonic() < deadline, core(thread, "get_request_counts")


def until_free(thread: ServerThread) -> None:
    """Nothing is left of any request: not in the core, nor the engine, nor the server's own count."""
    until_counts(thread, 0, 0)
    processor = thread.server.models.loaded()[0].engine.output_processor
    deadline = time.monotonic() + DEADLINE
    while thread.server.num_requests or processor.has_unfinished_requests():
        assert time.monotonic() < deadline, thread.server.num_requests
        thread.loop.run(asyncio.sleep(0))


def events_of(text: str) -> list[dict[str, Any]]:
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for choice in event.get("choices", ()) for token in choice["token_ids"]]


class TestEngineFailures:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_request_that_fails_is_a_500_and_nobody_elses(self, roomy: ServerThread, stream: bool) -> None:
        with httpx.Client(base_url=roomy.url, timeout=DEADLINE) as client:
            failed = client.post("/v1/completions", json={**BODY, "prompt": [1, FAIL_REQUEST], "stream": stream})
            assert failed.status_code == 500 and failed.headers["content-type"] == "application/json"
            assert failed.json()["error"]["type"] == "server_error"
            assert client.post("/v1/completions", json=BODY).status_code == 200
        until_free(roomy)

    def test_a_dead_core_is_a_500_for_all_and_health_says_so(self) -> None:
        with serving() as (thread, client):
            assert client.get("/health").status_code == 200
            for stream in (True, False):  # the death itself, and whoever comes after
                answer = client.post("/v1/completions", json={**BODY, "prompt": [1, RAISE], "stream": stream})
                assert answer.status_code == 500 and "told to raise" not in answer.text
                assert answer.headers["content-type"] == "application/json"
            assert client.get("/health").status_code == 503
            assert thread.server.num_requests == 0

    def test_a_failure_in_mid_stream_is_an_event_and_the_stream_ends(self) -> None:
        with serving() as (_, client):
            body = {**BODY, "prompt": [1, 2, RAISE_LATER], "max_tokens": 50, "stream": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200
            *tokens, error = events_of(answer.text)
            assert tokens_of(tokens) and error["error"]["type"] == "server_error"
            assert "http_stream_errors_total 1.0" in client.get("/metrics").text

    def test_streams_survive_a_core_that_is_restarted(self) -> None:
        with serving(parallel={"engine_restart": 1}) as (thread, client):
            body = {**BODY, "max_tokens": 40, "stream": True}
            expected = tokens_of(events_of(client.post("/v1/completions", json=body).text))
            core(thread, "collective_rpc", "light_fuse", None, [10, KILL], {})
            events = events_of(client.post("/v1/completions", json=body).text)
            assert tokens_of(events) == expected and events[-1]["choices"][0]["finish_reason"] == "length"
            assert client.get("/health").status_code == 200


def hang_up_on(url: str, body: dict[str, Any], when: Any, read: bool) -> None:
    """Sends a request, waits for its first event if `read`, calls `when`, closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content))
        connection.sendall(content)
        if read:
            received = b""
            while b"data: " not in received:
                received += connection.recv(65536)
        when()


class TestClientsWhoLeave:
    @pytest.mark.parametrize("stream", [False, True])
    def test_while_it_runs(self, roomy: ServerThread, stream: bool) -> None:
        body = {**ENDLESS, "stream": stream}
        hang_up_on(roomy.url, body, lambda: until_counts(roomy, 1, 0), read=stream)
        until_free(roomy)

    def test_while_several_prompts_and_answers_run(self, roomy: ServerThread) -> None:
        body = {**ENDLESS, "prompt": [[1, 2], [3, 4]], "n": 2}
        hang_up_on(roomy.url, body, lambda: until_counts(roomy, 1, 3), read=True)
        until_free(roomy)

    @pytest.mark.parametrize("stream", [False, True])
    def test_while_it_is_queued(self, roomy: ServerThread, stream: bool) -> None:
        def queue_another() -> None:
            until_counts(roomy, 1, 0)
            hang_up_on(roomy.url, {**ENDLESS, "stream": stream}, lambda: until_counts(roomy, 1, 1), read=False)
            until_counts(roomy, 1, 0)

        hang_up_on(roomy.url, ENDLESS, queue_another, read=True)
        until_free(roomy)

    @pytest.mark.parametrize("stream", [False, True])
    def test_while_it_is_tokenised_off_the_loop(
        self, roomy: ServerThread, stream: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        renderer = roomy.server.models.loaded()[0].renderer
        render, started, go_on = renderer.render_cmpl, threading.Event(), threading.Event()

        def slow_render(*arguments: Any) -> Any:
            started.set()
            assert go_on.wait(DEADLINE)
            return render(*arguments)

        monkeypatch.setattr(renderer, "render_cmpl", slow_render)

        def look() -> None:
            assert started.wait(DEADLINE)
            assert httpx.get(f"{roomy.url}/health", timeout=DEADLINE).status_code == 200  # the loop is free

        hang_up_on(roomy.url, {**ENDLESS, "stream": stream}, look, read=False)
        until_free(roomy)
        go_on.set()
        until_free(roomy)


def test_who_does_not_read_gets_all_tokens_in_fewer_events() -> None:
    """What is kept for a slow reader is the answer's tokens, not an event for each of them."""
    num_tokens = 2_000
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    with serving(max_model_len=4_000, num_gpu_blocks_override=400) as (thread, _):
        thread.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        body = {**ENDLESS, "max_tokens": num_tokens}
        with httpx.Client(base_url=thread.url, timeout=DEADLINE, transport=small) as client:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                until_counts(thread, 0, 0)  # the engine does not wait for the reader
                events = events_of(answer.read().decode())
        assert len(tokens_of(events)) == num_tokens
        assert len(events) < num_tokens / 2
        until_free(thread)


def test_more_requests_than_are_let_in_get_503_and_when_to_come_back() -> None:
    options = ServeOptions(max_queued_requests=1, disable_uvicorn_access_log=True)
    with serving(options, max_model_len=200_000, num_gpu_blocks_override=20_000) as (thread, client):

        def ask_too() -> None:
            refused = client.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "server_overloaded"
            assert client.get("/v1/models").status_code == 200

        hang_up_on(thread.url, ENDLESS, ask_too, read=True)
        until_free(thread)
        assert client.post("/v1/completions", json=BODY).status_code == 200
