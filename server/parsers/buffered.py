"""Tool parsers as states over a buffer: each state reads what it can and says which comes next."""

from collections.abc import Callable, Iterable

from .base import CallDelta, Delta, ToolParser, first_tag, held_back
from .json_value import JsonCall


class BufferedParser(ToolParser):
    """`self.state` is called until it returns False, which means that it needs more text."""

    def __init__(self, tools: Iterable[dict[str, object]] = ()) -> None:
        super().__init__(tools)
        self.buffer = ""
        self.state: Callable[[Delta], bool] = self.in_content
        self.at_end = False
        self._call: JsonCall | None = None

    def read(self, text: str, at_end: bool) -> Delta:
        self.buffer += text
        self.at_end = at_end
        delta = Delta()
        while self.state(delta):
            pass
        if at_end:
            self._give_up_call(delta)
            delta.content += self.buffer
            self.buffer = ""
        return delta

    def in_content(self, delta: Delta) -> bool:
        """Plain text, up to one of the start tags. White space between two calls is dropped."""
        position, tag = self.find(self.start_tags)
        if position >= 0:
            self.put_content(self.buffer[:position], delta)
            self.buffer = self.buffer[position + len(tag) :]
            self.enter_call(tag)
            return True
        keep = 0 if self.at_end else held_back(self.buffer, self.start_tags)
        ready = self.buffer[: len(self.buffer) - keep]
        if self.num_calls and not ready.strip() and not self.at_end:
            return False
        self.put_content(ready, delta)
        self.buffer = self.buffer[len(ready) :]
        return False

    def enter_call(self, tag: str) -> None:
        """Sets the state that reads what follows a start tag."""
        self.state = self.in_json

    def put_content(self, text: str, delta: Delta) -> None:
        if self.num_calls and not text.strip():
            return
        delta.content += text

    def find(self, tags: Iterable[str]) -> tuple[int, str]:
        return first_tag(self.buffer, tags)

    def skip(self, *tags: str) -> bool | None:
        """Drop white space, then one of the tags. True if one was there, None while that is not yet known."""
        self.buffer = self.buffer.lstrip()
        for tag in sorted(tags, key=len, reverse=True):
            if self.buffer.startswith(tag):
                self.buffer = self.buffer[len(tag) :]
                return True
        if not self.at_end and (not self.buffer or any(tag.startswith(self.buffer) for tag in tags)):
            return None
        return False

    def in_json(self, delta: Delta) -> bool:
        """One call object. A text that is none goes out as content, its start tag lost with it being one."""
        if self._call is None:
            self.buffer = self.buffer.lstrip()
            if not self.buffer:
                return False
            self._call = JsonCall()
        part, rest = self._call.feed(self.buffer)
        self.buffer = rest
        if part.name is not None:
            delta.add_call(self.new_call(part.name, part.arguments))
        elif part.arguments:
            delta.add_call(CallDelta(self.num_calls - 1, arguments=part.arguments))
        if self._call.failed:
            self._give_up_call(delta)
            self.state = self.in_content
            return bool(self.buffer)
        if self._call.complete:
            self._call = None
            self.state = self.after_call
            return True
        return False

    def after_call(self, delta: Delta) -> bool:
        """What follows a call: by default content again."""
        self.state = self.in_content
        return True

    def _give_up_call(self, delta: Delta) -> None:
        """A call that never had a name was none: its text is content."""
        call, self._call = self._call, None
        if call is not None and call.name is None:
            delta.content += call.unread
