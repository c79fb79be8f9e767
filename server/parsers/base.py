"""What all parsers are: machines fed with text, whose results do not depend on how the text was cut.

`AnswerParser` chains a reasoning parser and a tool parser and is what the API uses, for streams and whole answers
alike: a whole answer is fed in one piece.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Format = dict[str, Any]
"""What a text is held to, as the `format` of a structural tag says it."""


@dataclass(slots=True)
class CallDelta:
    """A part of one tool call: its first part has `id` and `name`, every part some of the arguments' JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """What a piece of text brought."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, other: "Delta") -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        for call in other.calls:
            self.add_call(call)

    def add_call(self, call: CallDelta) -> None:
        """Joins the arguments of one call's parts."""
        last = self.calls[-1] if self.calls else None
        if last is not None and last.index == call.index and call.id is None:
            last.arguments += call.arguments
        else:
            self.calls.append(call)


class Parser(ABC):
    """What `read` gives, joined, does not depend on where the text was cut."""

    def feed(self, text: str) -> Delta:
        return self.read(text, at_end=False)

    def finish(self) -> Delta:
        """What was held back."""
        return self.read("", at_end=True)

    @abstractmethod
    def read(self, text: str, at_end: bool) -> Delta: ...


class ToolParser(Parser):
    """Finds tool calls in an answer. One object an answer. An unfinished call's arguments end where the text does."""

    start_tags: tuple[str, ...] = ()
    """What begins a call; `held_back` keeps a piece of text that may turn out to be one."""

    def __init__(self, tools: Iterable[dict[str, object]] = ()) -> None:
        """`tools`: the request's functions, `{"name", "parameters"}`, for formats that need their types."""
        self.tools = {str(tool["name"]): tool for tool in tools}
        self.num_calls = 0

    def new_call(self, name: str, arguments: str = "", call_id: str | None = None) -> CallDelta:
        call = CallDelta(self.num_calls, call_id or new_call_id(), name, arguments)
        self.num_calls += 1
        return call


class ReasoningParser(Parser):
    """Tells an answer's reasoning from the rest: it gives `reasoning` and `content` only. One object an answer."""

    end_tag: str = ""
    """What ends the reasoning, where that is one token of the vocabulary: its tokens are counted up to it."""

    def __init__(self, prompt: str = "") -> None:
        """`prompt`: the rendered conversation, whose end tells whether the answer starts inside the reasoning."""
        self.in_reasoning = False

    def framed(self, answer: Format) -> Format | None:
        """An answer of that format, with the reasoning that comes before it. Asked before anything is fed.

        None where no reasoning comes, or how it ends cannot be said.
        """
        return None


class AnswerParser(Parser):
    """Reasoning first; what it leaves as content goes through the tool parser. Either may be None."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self.reasoning = reasoning
        self.tools = tools

    @property
    def has_calls(self) -> bool:
        return self.tools is not None and self.tools.num_calls > 0

    def read(self, text: str, at_end: bool) -> Delta:
        delta = Delta(content=text) if self.reasoning is None else self.reasoning.read(text, at_end)
        if self.tools is None or not (delta.content or at_end):
            return delta
        parsed = self.tools.read(delta.content, at_end)
        parsed.reasoning = delta.reasoning + parsed.reasoning
        return parsed


def new_call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def held_back(text: str, tags: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `tags`."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if tag.startswith(text[-length:]):
                longest = length
                break
    return longest


def first_tag(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """Where the first of `tags` begins, and which it is, the longest one there; (-1, "") where none does."""
    found = [(position, tag) for tag in tags if (position := text.find(tag)) >= 0]
    return min(found, key=lambda each: (each[0], -len(each[1])), default=(-1, ""))
