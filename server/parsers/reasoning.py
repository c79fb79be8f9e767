"""Reasoning between two tags. Where an answer starts is told by the end of its prompt."""

from .base import Delta, Format, ReasoningParser, held_back


class TaggedReasoning(ReasoningParser):
    """Reasoning first, between `start_tag` and `end_tag`; one newline is dropped at either side of it."""

    start_tag = "<think>"
    end_tag = "</think>"
    always = False
    """The model reasons even where neither its prompt nor its answer opens with the tag."""

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        opened, closed = prompt.rfind(self.start_tag), prompt.rfind(self.end_tag)
        self.in_reasoning = opened > closed or (self.always and closed < 0)
        self._done = closed > opened and not prompt[closed + len(self.end_tag) :].strip()
        self._buffer = ""
        self._held_newlines = ""
        self._at_start = True
        self._at_border = False
        self._skip_newline = False

    def framed(self, answer: Format) -> Format | None:
        if self._done:
            return None
        reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": self.end_tag}
        if self.in_reasoning:
            return {"type": "sequence", "elements": [reasoning, answer]}
        opened = {"type": "sequence", "elements": [reasoning | {"begin": self.start_tag}, answer]}
        return opened if _is_regular(answer) else {"type": "or", "elements": [opened, answer]}

    def read(self, text: str, at_end: bool) -> Delta:
        self._buffer += text
        delta = Delta()
        if self._at_start and not self._done and not self._read_start(at_end):
            return delta
        if self.in_reasoning:
            self._read_reasoning(delta, at_end)
        if not self.in_reasoning:
            self._read_content(delta, at_end)
        return delta

    def _read_start(self, at_end: bool) -> bool:
        """Whether the answer opens with the start tag is known; it is taken off."""
        stripped = self._buffer.lstrip()
        if not at_end and len(stripped) < len(self.start_tag) and self.start_tag.startswith(stripped):
            return False
        self._at_start = False
        if stripped.startswith(self.start_tag):
            self._buffer = stripped.removeprefix(self.start_tag)
            self.in_reasoning = True
        self._done, self._skip_newline = not self.in_reasoning, self.in_reasoning
        return True

    def _read_reasoning(self, delta: Delta, at_end: bool) -> None:
        if self._skip_newline and self._buffer:
            self._buffer = self._buffer.removeprefix("\n")
            self._skip_newline = False
        reasoning, tag, rest = self._buffer.partition(self.end_tag)
        if tag:
            delta.reasoning += (self._held_newlines + reasoning).removesuffix("\n")
            self._buffer, self._held_newlines = rest, ""
            self.in_reasoning, self._done, self._at_border = False, True, True
            return
        keep = 0 if at_end else held_back(self._buffer, (self.end_tag,))
        ready = self._held_newlines + self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(self._buffer) - keep :]
        self._held_newlines = "\n" if ready.endswith("\n") and not at_end else ""
        delta.reasoning += ready.removesuffix("\n") if self._held_newlines else ready

    def _read_content(self, delta: Delta, at_end: bool) -> None:
        if self._at_border:
            stripped = self._buffer.lstrip("\n")
            if not stripped and not at_end:
                return
            self._buffer, self._at_border = stripped, False
        delta.content += self._buffer
        self._buffer = ""


def _is_regular(answer: Format) -> bool:
    """Whether it is a regex, or a choice of texts: structural formats have no choice between that and a tag."""
    elements = answer["elements"] if answer["type"] == "or" else [answer]
    return all(each["type"] in ("regex", "const_string") for each in elements)


class DeepSeekR1Reasoning(TaggedReasoning):
    """Always starts inside the reasoning."""

    always = True


class MistralReasoning(TaggedReasoning):
    start_tag = "[THINK]"
    end_tag = "[/THINK]"


class GraniteReasoning(TaggedReasoning):
    """Granite 3 opens both parts with a sentence."""

    start_tag = "Here is my thought process:"
    end_tag = "Here is my response:"
