"""What the API processes of one server tell each other: their figures, so that /metrics and /load of any are of all.

Each listens on a Unix socket in a folder that only they can enter.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 5.0
_FIRST_ONLY = ("gauge", "info", "stateset", "unknown")
"""Kinds of metrics that are not summed: the core tells them to the first process."""


@dataclass(frozen=True)
class Peers:
    """`index`: which of the `count` processes this is."""

    folder: Path
    index: int
    count: int

    def seen_by(self, index: int) -> "Peers":
        return replace(self, index=index)

    async def listen(self, answers: dict[str, Callable[[], bytes]]) -> asyncio.Server:
        """Answers a line with what its word stands for. The server is to be closed."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            word = (await reader.readline()).decode().strip()
            writer.write(await asyncio.to_thread(answers[word]))
            writer.close()

        return await asyncio.start_unix_server(answer, self._socket_of(self.index))

    async def ask(self, word: str) -> list[bytes]:
        """What the others answer, the first process first. Who does not answer in time is left out."""
        others = [index for index in range(self.count) if index != self.index]
        answers = await asyncio.gather(*(self._ask(index, word) for index in others), return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, bytes)]

    async def _ask(self, index: int, word: str) -> bytes:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(self._socket_of(index))
            writer.write(f"{word}\n".encode())
            try:
                return await reader.read()
            finally:
                writer.close()

    def _socket_of(self, index: int) -> str:
        return str(self.folder / f"{index}")


def summed_text(texts: Sequence[bytes]) -> bytes:
    """The metrics of several processes as one: counters and histograms are summed, the rest is the first's."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Any] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            known = families.setdefault(family.name, family)
            if known is not family and family.type not in _FIRST_ONLY:
                known.samples = _summed([*known.samples, *family.samples])

    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)


class _Families:
    """What a registry takes for a collector."""

    def __init__(self, families: Iterable[Any]) -> None:
        self.families = families

    def collect(self) -> Iterable[Any]:
        return self.families


def _summed(samples: Iterable[Any]) -> list[Any]:
    """One sample for each name and labels."""
    by_labels: dict[object, Any] = {}
    for sample in samples:
        key = (sample.name, *sorted(sample.labels.items()))
        known = by_labels.get(key)
        by_labels[key] = sample if known is None else known._replace(value=known.value + sample.value)
    return list(by_labels.values())
