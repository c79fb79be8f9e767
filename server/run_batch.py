"""`corespan run-batch`: the requests of an OpenAI batch file, answered by the server's own handlers in this process.

Rows are written in the order of the input to OUTPUT.partial, which takes OUTPUT's name when it is whole; a run that
finds one goes on behind its last whole row.
"""

import argparse
import asyncio
import json
import logging
import os
import secrets
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.engine_args import AsyncEngineArgs
from .serve_options import ServeOptions

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger("corespan.server")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    AsyncEngineArgs.add_cli_args(parser)
    ServeOptions.add_arguments(parser)
    add("-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object a line")
    add("-o", "--output-file", required=True, metavar="FILE", help="where the answers go, in the requests' order")
    add("--max-concurrency", type=int, default=256, metavar="N", help="requests in flight at a time [%(default)s]")


def run(options: argparse.Namespace) -> int:
    """Raises ValueError for options that make no sense, OSError for files that cannot be read or written."""
    from .serve_command import engine_args_of

    if options.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {options.max_concurrency}")
    server_options = ServeOptions.from_namespace(options)
    source, target = Path(options.input_file), Path(options.output_file)
    lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    engine_args = engine_args_of(options, server_options, str(options.model))
    return asyncio.run(_run(lines, target, server_options, engine_args, options.max_concurrency))


async def _run(
    lines: list[str], target: Path, options: ServeOptions, engine_args: AsyncEngineArgs, max_concurrency: int
) -> int:
    from ..engine.async_llm import AsyncLLM
    from .http.app import build_app
    from .http.server import Server
    from .models import ServedModel
    from .serve import with_adapters

    options.disable_uvicorn_access_log = True
    options.api_key = []  # nobody is asked for one within a process
    engine = await asyncio.to_thread(AsyncLLM.from_engine_args, engine_args)
    names = options.served_model_name or [str(engine_args.served_model_name)]
    model = ServedModel(engine, names, options.chat_settings())
    try:
        server = Server(options)
        server.ready(await with_adapters(model, options))
        num_failed = await answer_batch(build_app(server), lines, target, max_concurrency)
    finally:
        await asyncio.to_thread(model.close)
    logger.info("%s: %d rows, %d of them errors", target, len(lines), num_failed)
    return 0


async def answer_batch(app: "ASGIApp", lines: list[str], target: Path, max_concurrency: int) -> int:
    """Writes a row for each line; returns how many rows are errors. `app` answers at most so many at a time."""
    partial = target.with_name(target.name + ".partial")
    done = _whole_rows(partial, lines)
    num_failed = sum(row["error"] is not None for row in done)
    running: deque[asyncio.Task[dict[str, Any]]] = deque()
    slots = asyncio.Semaphore(max_concurrency)

    async def answer(line: str) -> dict[str, Any]:
        async with slots:
            return await answer_line(app, line)

    with partial.open("a", encoding="utf-8") as file:
        try:
            running.extend(asyncio.create_task(answer(line)) for line in lines[len(done) :])
            while running:
                row = await running[0]
                running.popleft()
                num_failed += row["error"] is not None
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        os.fsync(file.fileno())
    partial.replace(target)
    return num_failed


def _whole_rows(partial: Path, lines: list[str]) -> list[dict[str, Any]]:
    """The rows that an earlier run left, whole ones only. Raises ValueError where another input was answered."""
    rows: list[dict[str, Any]] = []
    if not partial.exists():
        return rows
    kept = 0
    with partial.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            rows.append(json.loads(line))
            kept += len(line)
    os.truncate(partial, kept)
    ids = [_custom_id(line) for line in lines]
    if [row["custom_id"] for row in rows] != ids[: len(rows)]:
        raise ValueError(f"{partial} holds answers to other requests; remove it to begin anew")
    return rows


def _custom_id(line: str) -> str | None:
    try:
        request = json.loads(line)
    except ValueError:
        return None
    custom_id = request.get("custom_id") if isinstance(request, dict) else None
    return custom_id if isinstance(custom_id, str) else None


async def answer_line(app: "ASGIApp", line: str) -> dict[str, Any]:
    request_id = f"batch-{secrets.token_hex(8)}"
    try:
        request = checked(json.loads(line))
    except ValueError as error:
        refusal = {"message": f"not a request: {error}", "type": "invalid_request_error", "param": None, "code": None}
        status, body = 400, {"error": refusal}
    else:
        status, body = await _post(app, request["url"], request["body"], request_id)
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": _custom_id(line),
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None if status == 200 else body.get("error", body),
    }


def checked(request: Any) -> dict[str, Any]:
    """The request of a line. Raises ValueError naming what is wrong."""
    from .http.app import ENDPOINTS

    urls = [endpoint.path for endpoint in ENDPOINTS if endpoint.generates]
    if not isinstance(request, dict):
        raise ValueError("a line must be a JSON object")
    if not isinstance(request.get("custom_id"), str):
        raise ValueError("custom_id must be a text")
    if request.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, got {request['method']!r}")
    if request.get("url") not in urls:
        raise ValueError(f"url must be one of {', '.join(urls)}, got {request.get('url')!r}")
    if not isinstance(request.get("body"), dict):
        raise ValueError("body must be an object")
    if request["body"].get("stream"):
        raise ValueError("body.stream must be off: a row holds a whole answer")
    return request


async def _post(app: "ASGIApp", path: str, body: dict[str, Any], request_id: str) -> tuple[int, dict[str, Any]]:
    """Status and body of the application's answer."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    forever = asyncio.Event()  # the client never hangs up
    status, parts = 500, bytearray()

    async def receive() -> "Message":
        for message in messages:
            return message
        await forever.wait()
        raise AssertionError

    async def send(message: "Message") -> None:
        nonlocal status
        status = message.get("status", status)
        parts.extend(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
    }
    await app(scope, receive, send)
    answer = json.loads(bytes(parts))
    return status, answer if isinstance(answer, dict) else {"error": answer}
