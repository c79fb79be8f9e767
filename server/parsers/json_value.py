"""JSON read character by character, as a model writes it: where a value ends, and what a call object says."""

import json
from dataclasses import dataclass


class JsonScanner:
    """Follows one JSON value through text that comes in pieces, and knows where it ends."""

    def __init__(self) -> None:
        self.complete = False
        self._begun = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the value; all of them until it is `complete`.

        A number or word is complete where something else follows, which does not belong to it.
        """
        for position, character in enumerate(text):
            if self._in_string:
                self._pass_string(character)
            elif character == '"':
                self._begun = self._in_string = True
            elif character in "{[":
                self._begun = True
                self._depth += 1
            elif character in "}]" and self._depth:
                self._depth -= 1
            elif self._depth == 0 and (character in ",}]" or (character.isspace() and self._begun)):
                self.complete = True
                return position
            else:
                self._begun = self._begun or not character.isspace()
                continue
            if self._begun and self._depth == 0 and not self._in_string:
                self.complete = True
                return position + 1
        return len(text)

    def _pass_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


@dataclass(slots=True)
class CallPart:
    """What a piece of text told about a call: its name, once, and more of its arguments' JSON."""

    name: str | None = None
    arguments: str = ""


class JsonCall:
    """Reads `{"name": ..., "arguments": {...}}`, its keys in any order and others between them passed over.

    Arguments go out as they come once the name is known. `failed`: this is no call, or none that can be read.
    """

    ARGUMENT_KEYS = ("arguments", "parameters")

    def __init__(self) -> None:
        self.text = ""
        """Everything read, for whoever must give it back as content."""
        self.complete = False
        self.failed = False
        self.name: str | None = None
        self._rest = ""
        self._key: str | None = None
        self._value: JsonScanner | None = None
        self._value_text = ""
        self._opened = False
        self._held_arguments = ""
        self._has_arguments = False

    def feed(self, text: str) -> tuple[CallPart, str]:
        """What the text told, and what of it lies behind the call's end."""
        part = CallPart()
        self._rest += text
        while self._rest and not self.complete and not self.failed:
            taken = self._advance(part)
            self.text += self._rest[:taken]
            self._rest = self._rest[taken:]
            if taken == 0 and not self.complete:
                break
        if not self.complete:
            return part, ""
        rest, self._rest = self._rest, ""
        return part, rest

    @property
    def unread(self) -> str:
        """Everything read so far and still waiting to be: the call as text."""
        return self.text + self._rest

    def _advance(self, part: CallPart) -> int:
        """Read one thing more; how many characters it took, 0 where more are needed."""
        rest = self._rest
        if self._value is not None:
            return self._read_value(part)
        character = rest[0]
        if character.isspace() or (self._opened and character == ","):
            return 1
        if not self._opened:
            self._opened, self.failed = character == "{", character != "{"
            return 1 if self._opened else 0
        if character == "}" and self._key is None:
            self._finish(part)
            return 1
        if self._key is not None:
            self.failed = character != ":"
            self._value, self._value_text = JsonScanner(), ""
            return 1
        if character != '"':
            self.failed = True
            return 0
        scanner = JsonScanner()
        length = scanner.feed(rest)
        if not scanner.complete:
            return 0
        self._key = str(_loaded(rest[:length]))
        return length

    def _read_value(self, part: CallPart) -> int:
        assert self._value is not None
        length = self._value.feed(self._rest)
        piece = self._rest[:length]
        self._value_text += piece
        if self._key in self.ARGUMENT_KEYS:
            self._add_arguments(piece, part)
        if self._value.complete:
            if self._key == "name":
                self._take_name(part)
            elif self._key in self.ARGUMENT_KEYS:
                self._end_arguments(part)
            self._key = self._value = None
        return length

    def _take_name(self, part: CallPart) -> None:
        name = _loaded(self._value_text)
        if not isinstance(name, str) or not name:
            self.failed = True
            return
        self.name = part.name = name
        part.arguments += self._held_arguments
        self._held_arguments = ""

    def _add_arguments(self, piece: str, part: CallPart) -> None:
        """An object goes out as it is; anything else is looked at once it is whole."""
        if not self._value_text.lstrip().startswith("{"):
            return
        piece = piece if self._has_arguments else self._value_text.lstrip()
        self._has_arguments = True
        if self.name is None:
            self._held_arguments += piece
        else:
            part.arguments += piece

    def _end_arguments(self, part: CallPart) -> None:
        """Arguments that are no object: a text holds their JSON, null stands for none."""
        if self._has_arguments:
            return
        value = _loaded(self._value_text)
        self._has_arguments = True
        arguments = value if isinstance(value, str) and value.strip() else "{}" if not value else json.dumps(value)
        if self.name is None:
            self._held_arguments = arguments
        else:
            part.arguments += arguments

    def _finish(self, part: CallPart) -> None:
        if self.name is None:
            self.failed = True
            return
        self.complete = True
        if not self._has_arguments:
            part.arguments += "{}"


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
