"""Formats whose calls are JSON: objects with name and arguments, or a name beside its arguments."""

import re
import secrets
import string
from collections.abc import Iterable

from .base import CallDelta, Delta, held_back
from .buffered import BufferedParser
from .json_value import JsonScanner


class HermesParser(BufferedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated (Hermes, Qwen2.5, Qwen3)."""

    start_tags = ("<tool_call>",)

    def after_call(self, delta: Delta) -> bool:
        skipped = self.skip("</tool_call>")
        if skipped is None:
            return False
        self.state = self.in_content
        return True


class GraniteParser(BufferedParser):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]` (Granite 3), the array's brackets optional."""

    start_tags = ("<|tool_call|>", "<tool_call>")

    def enter_call(self, tag: str) -> None:
        self.state = self.in_array

    def in_array(self, delta: Delta) -> bool:
        if self.skip("[") is None:
            return False
        self.state = self.in_json
        return True

    def after_call(self, delta: Delta) -> bool:
        skipped = self.skip(",", "]", "</tool_call>")
        if skipped is None:
            return False
        self.state = self.in_content
        if skipped and self.buffer.lstrip().startswith("{"):
            self.state = self.in_json
        elif skipped and not self.at_end and not self.buffer.strip():
            self.state = self.between
        return True

    def between(self, delta: Delta) -> bool:
        """Behind a comma or the array's end: another call, or content."""
        if not self.buffer.strip() and not self.at_end:
            return False
        self.state = self.in_json if self.buffer.lstrip().startswith("{") else self.in_content
        return True


class Llama3JsonParser(BufferedParser):
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, only where the answer starts with one."""

    PYTHON_TAG = "<|python_tag|>"

    def __init__(self, tools: Iterable[dict[str, object]] = ()) -> None:
        super().__init__(tools)
        self.state = self.at_start

    def at_start(self, delta: Delta) -> bool:
        if not self.buffer.strip() and not self.at_end:
            return False
        stripped = self.buffer.lstrip()
        if self.PYTHON_TAG.startswith(stripped[: len(self.PYTHON_TAG)]) and len(stripped) < len(self.PYTHON_TAG):
            if not self.at_end:
                return False
        if stripped.startswith((self.PYTHON_TAG, "{")):
            self.buffer = stripped.removeprefix(self.PYTHON_TAG)
            self.state = self.in_json
        else:
            self.state = self.in_content
        return True

    def after_call(self, delta: Delta) -> bool:
        skipped = self.skip(";", ",")
        if skipped is None:
            return False
        self.state = self.in_json if skipped else self.in_content
        return True


class NamedJsonParser(BufferedParser):
    """Formats that write a name, a separator and the arguments' object. The subclasses say with which tags."""

    separators: tuple[str, ...] = ()
    """Between name and arguments; "{" is where the arguments begin at once."""
    end_tags: tuple[str, ...] = ()
    """Between and behind calls, dropped with the white space around them."""

    def __init__(self, tools: Iterable[dict[str, object]] = ()) -> None:
        super().__init__(tools)
        self._arguments: JsonScanner | None = None

    def enter_call(self, tag: str) -> None:
        self.state = self.in_name

    def in_name(self, delta: Delta) -> bool:
        position, separator = self.find(self.separators)
        if position < 0:
            return False
        name, call_id = self.name_of(self.buffer[:position])
        self.buffer = self.buffer[position + len(separator.removesuffix("{")) :]
        delta.add_call(self.new_call(name, call_id=call_id))
        self.state = self.in_arguments
        return True

    def name_of(self, text: str) -> tuple[str, str | None]:
        """The function's name, and the call's id where the format carries one."""
        return text.strip(), None

    def in_arguments(self, delta: Delta) -> bool:
        if self._arguments is None:
            position = self.buffer.find("{")
            if position < 0:
                return False
            self.buffer = self.buffer[position:]
            self._arguments = JsonScanner()
        length = self._arguments.feed(self.buffer)
        delta.add_call(CallDelta(self.num_calls - 1, arguments=self.buffer[:length]))
        self.buffer = self.buffer[length:]
        if not self._arguments.complete:
            return False
        self._arguments = None
        self.state = self.after_call
        return True

    def after_call(self, delta: Delta) -> bool:
        skipped = self.skip(*self.end_tags)
        if skipped is None:
            return False
        if not skipped:
            self.state = self.in_content
        return True


class DeepSeekV3Parser(NamedJsonParser):
    """DeepSeek V3: kind, separator, name, then the arguments in a fence of ```json."""

    start_tags = ("<｜tool▁call▁begin｜>",)
    separators: tuple[str, ...] = ("```json", "```")
    end_tags = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    _BEGIN = "<｜tool▁calls▁begin｜>"

    def in_content(self, delta: Delta) -> bool:
        self.buffer = self.buffer.replace(self._BEGIN, "")
        if not self.at_end and self.buffer and (keep := held_back(self.buffer, (self._BEGIN,))):
            kept = self.buffer[-keep:]
            self.buffer = self.buffer[:-keep]
            again = super().in_content(delta)
            self.buffer += kept
            return again
        return super().in_content(delta)

    def name_of(self, text: str) -> tuple[str, str | None]:
        return text.rpartition("<｜tool▁sep｜>")[2].strip(), None


class DeepSeekV31Parser(DeepSeekV3Parser):
    """DeepSeek V3.1: name, separator, bare arguments."""

    separators = ("<｜tool▁sep｜>",)

    def name_of(self, text: str) -> tuple[str, str | None]:
        return text.strip(), None


class KimiK2Parser(NamedJsonParser):
    """Kimi K2: `functions.NAME:INDEX`, which is the call's id too, then the arguments."""

    start_tags = ("<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_begin|>")
    separators = ("<|tool_call_argument_begin|>",)
    end_tags = ("<|tool_call_end|>", "<|tool_calls_section_end|>")

    def name_of(self, text: str) -> tuple[str, str | None]:
        call_id = text.strip()
        name = re.sub(r":\d+$", "", call_id).removeprefix("functions.")
        return name, call_id


class MistralParser(NamedJsonParser):
    """`[TOOL_CALLS]` and an array of objects, or, in newer models, `NAME[ARGS]{...}` or `NAME{...}` each."""

    start_tags = ("[TOOL_CALLS]",)
    separators = ("[ARGS]", "{")
    end_tags = ("[TOOL_CALLS]", ",")

    def enter_call(self, tag: str) -> None:
        self.state = self.array_or_name

    def array_or_name(self, delta: Delta) -> bool:
        self.buffer = self.buffer.lstrip()
        if not self.buffer:
            return False
        if self.buffer[0] in "[{":
            self.buffer = self.buffer.removeprefix("[")
            self.state = self.in_json
        else:
            self.state = self.in_name
        return True

    def after_call(self, delta: Delta) -> bool:
        skipped = self.skip(*self.end_tags)
        if skipped is None:
            return False
        if not skipped:
            self.buffer = self.buffer.removeprefix("]")
        self.state = self.array_or_name if skipped else self.in_content
        return True

    def new_call(self, name: str, arguments: str = "", call_id: str | None = None) -> CallDelta:
        """Mistral's templates take ids of nine letters and digits only."""
        alphabet = string.ascii_letters + string.digits
        return super().new_call(name, arguments, call_id or "".join(secrets.choice(alphabet) for _ in range(9)))
