"""The server's process: what it answers while it loads, how it ends, and with which status."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_serve
import httpx
import psutil
import pytest
from deadlines import DEADLINE
from fake_executor import KILL

BODY: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 100_000, "ignore_eos": True, "return_token_ids": True}


class Process:
    """`corespan serve` on a Unix socket in `folder`; `client` speaks to it, `log` is its log once it has ended."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.fifo = folder / "load"
        os.mkfifo(self.fifo)
        uds = self.uds = str(folder / "socket")
        fake = {"max_model_len": 200_000, "num_gpu_blocks_override": 20_000, "step_seconds": 0.001}
        arguments = [json.dumps({"uds": uds, **options}), json.dumps(fake), str(self.fifo)]
        self.process = subprocess.Popen(
            [sys.executable, fake_serve.__file__, *arguments], stderr=subprocess.PIPE, text=True
        )
        self.client = httpx.Client(transport=httpx.HTTPTransport(uds=uds), base_url="http://x", timeout=DEADLINE)
        with open(self.fifo, "w") as self._load_end:  # returns once the server loads: its socket listens by then
            self.while_loading = {
                path: self.client.get(path) for path in ("/health", "/live", "/version", "/v1/models")
            }
            self.refused = self.client.post("/v1/completions", json=BODY)

    def wait_ready(self) -> str:
        """The ready line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "Serving" in line:
                return line
        raise AssertionError("the server ended")

    def stream(self) -> tuple[threading.Event, list[str], threading.Thread]:
        """A stream read in a thread: an event for its first data, its lines, the thread."""
        first, lines = threading.Event(), []

        def read() -> None:
            with self.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
                for line in response.iter_lines():
                    if line:
                        lines.append(line)
                        first.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert first.wait(DEADLINE)
        return first, lines, thread

    def end(self) -> tuple[int, str]:
        """Exit status and the rest of the log."""
        log = self.process.communicate(timeout=DEADLINE)[1]
        return self.process.returncode, log


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Process] = []

    def begin(**options: Any) -> Process:
        started.append(Process(tmp_path, **options))
        return started[-1]

    yield begin
    for each in started:
        each.client.close()
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()


@pytest.fixture
def service_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What systemd would listen on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield manager


def test_answers_503_while_it_loads_then_says_what_it_serves_and_drains(
    start: Any, tmp_path: Path, service_manager: socket.socket
) -> None:
    server = start(shutdown_timeout=DEADLINE)
    assert {path: answer.status_code for path, answer in server.while_loading.items()} == {
        "/health": 503,
        "/live": 200,
        "/version": 200,
        "/v1/models": 503,
    }
    assert server.refused.status_code == 503 and server.refused.headers["retry-after"]
    ready = server.wait_ready()
    assert f"Serving fake on unix:{tmp_path}/socket: 200000 tokens of context, temperature 1" in ready
    assert server.client.get("/health").status_code == 200
    assert service_manager.recv(100) == b"READY=1"

    _, lines, reading = server.stream()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.stderr is not None
    while "Shutting down: 1 requests" not in server.process.stderr.readline():
        pass
    assert service_manager.recv(100) == b"STOPPING=1"
    assert server.client.get("/health").status_code == 503
    assert server.client.post("/v1/completions", json=BODY).status_code == 503
    assert reading.is_alive()

    server.process.send_signal(signal.SIGTERM)  # the second: no more waiting
    reading.join(DEADLINE)
    assert "server is shutting down" in lines[-2] and lines[-1] == "data: [DONE]"
    assert server.end()[0] == 0
    assert not (tmp_path / "socket").exists()


def test_a_dead_core_ends_the_process_with_status_1(start: Any) -> None:
    server = start()
    server.wait_ready()
    answer = server.client.post("/v1/completions", json={**BODY, "prompt": [1, KILL]})
    assert answer.status_code == 500
    status, log = server.end()
    assert status == 1 and "The engine is down" in log


def test_stopped_while_it_loads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "load")
    options = json.dumps({"uds": str(tmp_path / "socket")})
    process = subprocess.Popen([sys.executable, fake_serve.__file__, options, "{}", str(tmp_path / "load")])
    with open(tmp_path / "load", "w"):
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 130


def _api_processes(server: Process) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [each for each in children if "api_process" in " ".join(each.cmdline())]


def test_several_processes_are_one_server(start: Any) -> None:
    server = start(api_server_count=3, shutdown_timeout=DEADLINE)
    server.wait_ready()
    first, apis = psutil.Process(server.process.pid), _api_processes(server)
    assert len(apis) == 2

    def anew(method: str, path: str, **more: Any) -> httpx.Response:
        """On a connection of its own, which any of them may accept."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=server.uds), base_url="http://x", timeout=DEADLINE) as one:
            return one.request(method, path, **more)

    first.suspend()
    try:
        assert anew("GET", "/live").status_code == 200  # by another than the first
    finally:
        first.resume()
    short = {**BODY, "max_tokens": 3}
    assert all(anew("POST", "/v1/completions", json=short).status_code == 200 for _ in range(12))
    _, lines, reading = server.stream()
    for _ in range(6):
        metrics = anew("GET", "/metrics").text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="200"} 12.0' in metrics
        assert 'vllm:generation_tokens_total{engine="0",model_name="fake"}' in metrics
        assert 'vllm:num_requests_running{engine="0",model_name="fake"} 1.0' in metrics
        assert anew("GET", "/load").json() == {"server_load": 1}
    refused = anew("POST", "/v1/responses", json={"input": "x", "previous_response_id": "resp_1"})
    assert refused.status_code == 400 and "--api-server-count 1" in refused.text

    server.process.send_signal(signal.SIGTERM)
    while anew("GET", "/health").status_code != 503:
        pass
    assert reading.is_alive()
    server.process.send_signal(signal.SIGTERM)
    reading.join(DEADLINE)
    assert lines[-1] == "data: [DONE]"
    assert server.end()[0] == 0
    assert not any(each.is_running() for each in apis)


def test_a_process_that_dies_ends_the_server(start: Any) -> None:
    server = start(api_server_count=2)
    server.wait_ready()
    (api,) = [
        each for each in psutil.Process(server.process.pid).children() if "api_process" in " ".join(each.cmdline())
    ]
    api.kill()
    status, log = server.end()
    assert status == 1 and "An API process has ended with status -9" in log
