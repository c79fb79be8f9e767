"""Many streams on a server, read as cheaply as Python can: events are counted, not parsed. Used by bench_serve.py."""

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

import uvloop


class Stream(asyncio.Protocol):
    """One request on a connection of its own. `done` gives the seconds to its first event, and how many there were."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self._began = 0.0
        self._first: float | None = None
        self._events = 0
        self._tail = b""
        self.done: asyncio.Future[tuple[float, int]] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self) -> None:
        self._began = time.perf_counter()
        self._transport.write(self._head)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        found = data.count(b"data: {")
        if found and self._first is None:
            self._first = time.perf_counter() - self._began
        self._events += found
        self._tail = (self._tail + data)[-64:]
        if b"data: [DONE]" in self._tail and not self.done.done():
            self.done.set_result((self._first or 0.0, self._events))
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the stream broke off: {self._tail!r}"))


async def run(url: str, streams: int, tokens: int, prompt_len: int, one_by_one: bool) -> dict[str, float]:
    """Seconds of it all, and the median of the seconds to the first event."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    loop = asyncio.get_running_loop()

    async def opened(number: int) -> Stream:
        body = {"prompt": prompt_of(number, prompt_len), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        content = json.dumps(body | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        _, stream = await loop.create_connection(lambda: Stream(head.encode() + content), host, port)
        return stream

    async def answered(stream: Stream) -> tuple[float, int]:
        stream.send()
        return await stream.done

    await answered(await opened(10_000))
    ready = [await opened(number) for number in range(streams)]
    began = time.perf_counter()
    if one_by_one:
        results = [await answered(stream) for stream in ready]
    else:
        results = await asyncio.gather(*map(answered, ready))
    seconds = time.perf_counter() - began
    firsts = sorted(first for first, _ in results)
    return {"seconds": seconds, "ttft_p50_s": firsts[len(firsts) // 2], "events": sum(count for _, count in results)}


def prompt_of(number: int, length: int) -> list[int]:
    return [10 + (number * 7 + position * 13) % 200 for position in range(length)]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(**given))), flush=True)
