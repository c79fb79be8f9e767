"""The commands that speak to a server, and the batch file answered by the server's handlers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from http_server import ServerThread

from corespan.server import cli
from corespan.server.http.app import build_app
from corespan.server.run_batch import answer_batch


@pytest.mark.parametrize(
    "command",
    [
        ["complete", "-q", "hello"],
        ["generate", "hello"],
        ["generate", "--chat", "hello"],
        ["chat", "-q", "hello", "--system-prompt", "be brief"],
    ],
)
def test_commands_print_what_a_server_streams(
    command: list[str], tiny_server: ServerThread, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--url", f"{tiny_server.url}/v1", "--max-tokens", "5", "--stats", "--seed", "1"]

    assert cli.main([*command, *options]) == 0

    printed = capsys.readouterr()
    assert printed.out.strip() and "5 tokens" in printed.err


def test_a_servers_refusal_is_told_in_one_line(tiny_server: ServerThread, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["complete", "-q", "hello", "--url", f"{tiny_server.url}/v1", "--model-name", "other"])

    assert status == 1
    assert "answers 404" in capsys.readouterr().err


LINES = [
    json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
    for name, url, body in (
        ("a", "/v1/completions", {"model": "tiny", "prompt": "one", "max_tokens": 9, "ignore_eos": True}),
        ("b", "/v1/completions", {"model": "tiny", "prompt": "two", "max_tokens": 1}),
        ("c", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("stream", "/v1/completions", {"model": "tiny", "prompt": "one", "stream": True}),
        ("url", "/health", {}),
        ("model", "/v1/completions", {"model": "none", "prompt": "one"}),
    )
] + ["{not json"]


def run(server: ServerThread, target: Path, max_concurrency: int = 2) -> list[dict[str, Any]]:
    async def answer() -> int:
        return await answer_batch(build_app(server.server), LINES, target, max_concurrency)

    assert server.loop.run(answer()) == 4
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_a_batch_has_a_row_for_every_line_in_order(tiny_server: ServerThread, tmp_path: Path) -> None:
    rows = run(tiny_server, tmp_path / "out.jsonl")

    assert [row["custom_id"] for row in rows] == ["a", "b", "c", "stream", "url", "model", None]
    assert [row["response"]["status_code"] for row in rows] == [200, 200, 200, 400, 400, 404, 400]
    assert [row["error"] is None for row in rows] == [True] * 3 + [False] * 4
    assert rows[0]["response"]["body"]["usage"]["completion_tokens"] == 9
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_batch_goes_on_behind_the_last_whole_row(tiny_server: ServerThread, tmp_path: Path) -> None:
    whole = run(tiny_server, tmp_path / "first.jsonl")
    begun = [json.dumps(row) for row in whole[:2]]
    (tmp_path / "out.jsonl.partial").write_text("\n".join(begun) + '\n{"id": "torn')

    rows = run(tiny_server, tmp_path / "out.jsonl")

    assert rows[:2] == whole[:2]
    assert rows[2]["id"] != whole[2]["id"]


def test_answers_to_other_requests_are_not_gone_on_from(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.partial").write_text('{"custom_id": "other", "error": null}\n')

    async def application(*_: Any) -> None:
        raise AssertionError("nothing is asked")

    with pytest.raises(ValueError, match="answers to other requests"):
        asyncio.run(answer_batch(application, LINES, tmp_path / "out.jsonl", 1))
