"""`--url`: chats and completions of any OpenAI-compatible server, streamed, with the standard library's HTTP alone."""

import argparse
import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .conversation import Conversation
from .streaming import Interruption, Statistics
from .terminal import note

if TYPE_CHECKING:
    from ..protocol.params import SamplingParams

_UNSET: dict[str, Any] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": None, "stop": []}
"""What is not sent, as not every server knows the name."""


class Remote:
    """One model of a server at `url`, which ends in /v1. Its errors are ValueError; OSError where it is not reached."""

    def __init__(self, url: str, model: str | None, api_key: str, statistics: Statistics) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url must begin with http:// or https://, got {url!r}")
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.statistics = statistics
        self.model = model or self._first_model()

    def complete(self, prompt: str, params: "SamplingParams", interruption: Interruption) -> Iterator[str]:
        """The completion's text as it comes. The request is made at once."""
        chunks = self._stream("/completions", {"prompt": prompt} | _body(params), interruption)
        return (choice["text"] for choice in chunks if choice.get("text"))

    def chat(
        self, messages: list[dict[str, str]], params: "SamplingParams", interruption: Interruption
    ) -> Iterator[str]:
        chunks = self._stream("/chat/completions", {"messages": messages} | _body(params), interruption)
        return (text for choice in chunks if (text := (choice.get("delta") or {}).get("content")))

    def _first_model(self) -> str:
        with self._open("/models", None) as answer:
            listing = json.load(answer).get("data") or []
        if not listing:
            raise ValueError(f"{self.url} serves no model")
        return str(listing[0]["id"])

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self.url} answers {error.code}: {_message(error.read())}") from None
        except urllib.error.URLError as error:
            raise OSError(f"cannot reach {self.url}: {error.reason}") from None

    def _stream(self, path: str, body: dict[str, Any], interruption: Interruption) -> Iterator[dict[str, Any]]:
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        answer = interruption.wait(lambda: self._open(path, body))
        return iter(()) if answer is None else self._choices(answer, interruption, began)

    def _choices(self, answer: Any, interruption: Interruption, began: float) -> Iterator[dict[str, Any]]:
        """The choices of a stream's events; hangs up at once when interrupted. Raises ValueError for an error event."""
        first: float | None = None
        with answer:
            while line := interruption.wait(answer.readline):
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(f"{self.url}: {_message(data)}")
                if event.get("choices") and first is None:
                    first = time.perf_counter()
                if usage := event.get("usage"):
                    self._count(usage, began, first or began)
                yield from event.get("choices") or ()

    def _count(self, usage: dict[str, Any], began: float, first: float) -> None:
        statistics, num_tokens = self.statistics, int(usage.get("completion_tokens") or 0)
        statistics.num_prompt_tokens += int(usage.get("prompt_tokens") or 0)
        statistics.num_tokens += num_tokens
        statistics.num_timed_tokens += max(num_tokens - 1, 0)
        statistics.first_seconds += first - began
        statistics.later_seconds += time.perf_counter() - first


class RemoteChat(Conversation):
    """A server answers."""

    def __init__(self, remote: Remote, params: "SamplingParams", system: str | None = None) -> None:
        super().__init__(params, system)
        self.remote = remote

    def _begin(self, interruption: Interruption) -> Iterator[str]:
        return self.remote.chat(self.messages, self.params, interruption)


@contextlib.contextmanager
def running_remote(options: argparse.Namespace) -> Iterator[Remote]:
    """The server of --url; at the end, with --stats, what was counted."""
    if options.chat_template is not None:
        raise ValueError("--chat-template is for an engine of one's own, not for --url")
    statistics = Statistics()
    key = options.api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY"
    yield Remote(options.url, options.model_name, key, statistics)
    if options.stats and statistics.num_tokens:
        note(str(statistics))


def _body(params: "SamplingParams") -> dict[str, Any]:
    body: dict[str, Any] = {name: getattr(params, name) for name in ("max_tokens", "temperature", "top_p")}
    for name, unset in _UNSET.items():
        if (value := getattr(params, name)) != unset and value is not None:
            body[name] = value
    structured = params.structured_outputs
    if structured is not None and structured.json is not None:
        schema = json.loads(structured.json) if isinstance(structured.json, str) else structured.json
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return body


def _message(body: bytes) -> str:
    """What an error's body says, of whatever shape it is."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:200]
