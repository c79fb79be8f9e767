"""Streamed requests to an OpenAI-compatible server, with asyncio's sockets alone: a client that costs little itself."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Timing:
    """One answer; times in seconds. `error` says why there is none. `began` is on the clock of `time.perf_counter`."""

    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    error: str | None = None
    text: str = ""
    began: float = 0.0


class Target:
    """A server: `url` without a path, what every request has for headers."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Raises ValueError for what is no URL of a server."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--base-url must be like http://localhost:8000, got {url!r}")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc, "Connection": "close", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def ask(self, path: str, body: Mapping[str, Any]) -> Timing:
        """A streamed answer, timed."""
        timing = Timing(began=time.perf_counter())
        last = timing.began
        try:
            async for event in self._events(path, body):
                if "error" in event:
                    raise OSError(str(event["error"]))
                if usage := event.get("usage"):
                    timing.num_input, timing.num_output = usage["prompt_tokens"], usage["completion_tokens"]
                if text := "".join(map(_text, event["choices"])):
                    now = time.perf_counter()
                    if timing.text:
                        timing.gaps.append(now - last)
                    else:
                        timing.ttft = now - timing.began
                    timing.text += text
                    last = now
            timing.latency = last - timing.began
            if not timing.text:
                timing.error = "an answer without text"
        except (OSError, EOFError, ValueError) as error:
            timing.error = str(error) or type(error).__name__
        return timing

    async def request(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body of an answer. Raises OSError where there is none."""
        async with self._exchange(method, path, b"") as (status, parts):
            return status, b"".join([part async for part in parts])

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Raises OSError for a refusal."""
        async with self._exchange("POST", path, json.dumps(body).encode()) as (status, parts):
            if status != 200:
                refusal = b"".join([part async for part in parts])
                raise OSError(f"{status}: {refusal[:300].decode(errors='replace')}")
            rest = b""
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and b"[DONE]" not in line[:14]:
                        yield json.loads(line[5:])

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, content: bytes
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._secure or None)
        try:
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            if content:
                head += "Content-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            chunked = b"transfer-encoding: chunked" in answer
            yield int(answer.split()[1]), _chunks(reader) if chunked else _rest(reader)
        finally:
            writer.close()


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(65536):
        yield part
