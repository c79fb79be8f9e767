"""gpt-oss' harmony format: messages that each name a channel. `HarmonyReader` reads it for both parsers.

Analysis is reasoning; the final channel, and comments to nobody, are content; a message to `functions.NAME` is a call.
"""

import re
from collections.abc import Iterable

from .base import CallDelta, Delta, ReasoningParser, ToolParser, first_tag, held_back

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_HEADS = ("<|start|>", _CHANNEL)
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ALL = (*_HEADS, _MESSAGE, *_ENDS)
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")


class HarmonyReader:
    """`in_analysis`, and `function`, the one that the open message calls, are true to the last text that was read."""

    def __init__(self, prompt: str = "") -> None:
        """`prompt`: its last message may be left open for the answer to continue."""
        self.in_analysis = False
        self.function: str | None = None
        self._buffer = ""
        self._in_head = False
        head, opened, body = prompt.rpartition(_MESSAGE)
        if opened and not any(end in body for end in (*_ENDS, *_HEADS)):
            self._open_message(head[head.rfind("<|start|>") :])
        elif prompt.rstrip().endswith("<|start|>assistant"):
            self._in_head = True

    def read(self, text: str, at_end: bool) -> Iterable[str]:
        """Pieces of the messages' bodies; between two of them, the state tells which message they are of.

        A new call is an empty piece with `function` set.
        """
        self._buffer += text
        while True:
            if self._in_head:
                head, tag, rest = self._buffer.partition(_MESSAGE)
                if not tag:
                    break
                self._buffer, self._in_head = rest, False
                self._open_message(head)
                if self.function is not None:
                    yield ""
                continue
            position, tag = first_tag(self._buffer, _ALL)
            if not tag:
                break
            if position:
                yield self._buffer[:position]
            self._buffer = self._buffer[position + len(tag) :]
            self.in_analysis, self.function = False, None
            if tag in _HEADS:
                self._in_head, self._buffer = True, tag + self._buffer
        yield from self._rest(at_end)

    def _rest(self, at_end: bool) -> Iterable[str]:
        """What can be no beginning of a tag. A head that never ended is dropped, unless it is plain text."""
        if self._in_head:
            if at_end:
                plain = "" if self._buffer.startswith(_HEADS) else self._buffer
                self._buffer, self._in_head = "", False
                if plain:
                    yield plain
            return
        text_ends = at_end and self.function is None  # in a call's JSON, half a tag is nothing
        keep = 0 if text_ends else held_back(self._buffer, _ALL)
        ready, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        if ready:
            yield ready

    def _open_message(self, head: str) -> None:
        recipient = _RECIPIENT.search(head)
        self.function = recipient[1] if recipient else None
        channel = _CHANNEL_NAME.search(head)
        self.in_analysis = channel is not None and channel[1] == "analysis" and recipient is None


class HarmonyToolParser(ToolParser):
    """Calls, content, and the reasoning too where no reasoning parser took it off before."""

    def __init__(self, tools: Iterable[dict[str, object]] = ()) -> None:
        super().__init__(tools)
        self._reader = HarmonyReader()

    def read(self, text: str, at_end: bool) -> Delta:
        delta = Delta()
        for piece in self._reader.read(text, at_end):
            if self._reader.function is None:
                if self._reader.in_analysis:
                    delta.reasoning += piece
                else:
                    delta.content += piece
            elif not piece:
                delta.add_call(self.new_call(self._reader.function))
            else:
                delta.add_call(CallDelta(self.num_calls - 1, arguments=piece))
        return delta


class HarmonyReasoning(ReasoningParser):
    """Calls go on to the tool parser, spelled as the model does."""

    end_tag = "<|end|>"

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._reader = HarmonyReader(prompt)
        self.in_reasoning = self._reader.in_analysis
        self._open_call = False

    def read(self, text: str, at_end: bool) -> Delta:
        delta = Delta()
        for piece in self._reader.read(text, at_end):
            if self._reader.in_analysis:
                delta.reasoning += piece
                continue
            function = self._reader.function
            if self._open_call and (function is None or not piece):
                delta.content += "<|call|>"
                self._open_call = False
            if function is not None and not piece:
                delta.content += f"{_CHANNEL}commentary to=functions.{function}{_MESSAGE}"
                self._open_call = True
            delta.content += piece
        self.in_reasoning = self._reader.in_analysis
        return delta
