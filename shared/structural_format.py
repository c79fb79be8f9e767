"""Structural tags in their newer form, `{"type": "structural_tag", "format": ...}`, in llguidance's notation.

Translated is what that notation can say exactly; the rest is refused by name. Called by `grammar`.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

_FREE_TEXT = "/(.|\\n)*/"


class _ConstString(msgspec.Struct, tag="const_string", forbid_unknown_fields=True):
    value: str


class _JsonSchema(msgspec.Struct, tag="json_schema", forbid_unknown_fields=True):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"


class _Regex(msgspec.Struct, tag="regex", forbid_unknown_fields=True):
    pattern: str


class _AnyText(msgspec.Struct, tag="any_text", forbid_unknown_fields=True):
    excludes: Annotated[list[str], msgspec.Meta(max_length=0)] = []


class _Sequence(msgspec.Struct, tag="sequence", forbid_unknown_fields=True):
    elements: "list[_Format]"


class _Or(msgspec.Struct, tag="or", forbid_unknown_fields=True):
    elements: "list[_Format]"


class _Tag(msgspec.Struct, tag="tag", forbid_unknown_fields=True):
    begin: str
    content: "_Format"
    end: str


class _TriggeredTags(msgspec.Struct, tag="triggered_tags", forbid_unknown_fields=True):
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Annotated[list[str], msgspec.Meta(max_length=0)] = []


class _TagsWithSeparator(msgspec.Struct, tag="tags_with_separator", forbid_unknown_fields=True):
    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


_Format = _ConstString | _JsonSchema | _Regex | _AnyText | _Sequence | _Or | _Tag | _TriggeredTags | _TagsWithSeparator


class StructuralFormat(msgspec.Struct):
    format: _Format


@dataclass(frozen=True, slots=True)
class _Part:
    """`text`: what stands for a format in a rule, "" for nothing. A regular one may also stand in a terminal."""

    text: str
    regular: bool = False
    open_ended: bool = False  # the lexer takes as much as matches: nothing may follow that it could take too
    takes_all: bool = False  # free text, to the end of the answer


@dataclass(slots=True)
class _Translation:
    """`json_rule` says a schema in the notation; `special_token` names a text that is one token and no text."""

    json_rule: Callable[[Any], str]
    special_token: Callable[[str], str | None]
    lines: list[str] = field(default_factory=list)

    def of(self, given: _Format) -> _Part:
        """Raises ValueError for what cannot be said."""
        match given:
            case _ConstString(value):
                return self._text(value)
            case _JsonSchema(schema):
                return _Part(self.json_rule(schema))
            case _Regex(pattern):
                return _Part(_delimited(pattern), regular=True, open_ended=True)
            case _AnyText():
                return _Part("TEXT", open_ended=True, takes_all=True)
            case _Sequence(elements):
                return self._sequence([self.of(element) for element in elements])
            case _Or(elements):
                return self._choice([self.of(element) for element in _some("elements", elements)])
            case _Tag():
                return self._tag(given)
            case _TriggeredTags():
                return self._triggered(given)
            case _TagsWithSeparator():
                return self._separated(given)

    def _text(self, text: str) -> _Part:
        special = self.special_token(text) if text else None
        return _Part(special) if special else _Part(json.dumps(text) if text else "", regular=True)

    def _sequence(self, parts: Sequence[_Part]) -> _Part:
        """Neighbours that are regular become one terminal: only there may an open end be followed by something."""
        merged: list[_Part] = []
        for part in (part for part in parts if part.text):
            if merged and merged[-1].regular and part.regular:
                before = merged.pop()
                part = _Part(f"{before.text} {part.text}", True, before.open_ended or part.open_ended)
            merged.append(part)
        for before, behind in zip(merged, merged[1:], strict=False):
            if before.takes_all:
                raise ValueError("any_text and triggered_tags are supported at the end only, or any_text in a tag")
            if before.open_ended:
                raise ValueError(f"a regex or a choice before {behind.text[:40]} is not supported")
        if len(merged) == 1:
            return merged[0]
        last = merged[-1] if merged else _Part("")
        text = " ".join(self._symbol(part) for part in merged)
        return _Part(text, open_ended=last.open_ended, takes_all=last.takes_all)

    def _choice(self, parts: Sequence[_Part]) -> _Part:
        if len(parts) == 1:
            return parts[0]
        if all(part.regular for part in parts):
            return _Part("(" + " | ".join(part.text or '""' for part in parts) + ")", regular=True, open_ended=True)
        if any(part.open_ended and not part.takes_all for part in parts) or not all(part.text for part in parts):
            raise ValueError(
                "a choice between a regex, or nothing, and a format with rules of its own is not supported"
            )
        text = " | ".join(self._symbol(part) for part in parts)
        takes_all = any(part.takes_all for part in parts)
        return _Part(f"({text})", open_ended=takes_all, takes_all=takes_all)

    def _tag(self, tag: _Tag, begin: str | None = None) -> _Part:
        """`begin`: what is left of it to be said."""
        opening, closing = self._text(tag.begin if begin is None else begin), self._text(tag.end)
        if not isinstance(tag.content, _AnyText) or not tag.end:
            return self._sequence([opening, self.of(tag.content), closing])
        content = self._until(tag.end)
        return self._sequence([opening, _Part(content)])

    def _until(self, text: str) -> str:
        """A symbol for free text up to, and with, where `text` first stands."""
        special = self.special_token(text)
        return (
            self._define("until", f"TEXT {special}")
            if special
            else self._define("until", f"TEXT {json.dumps(text)}", lazy=True)
        )

    def _triggered(self, given: _TriggeredTags) -> _Part:
        """Free text, with tags where triggers are. With `at_least_one` a tag comes first."""
        triggers = {trigger: self._until(trigger) for trigger in _some("triggers", given.triggers) if trigger}
        following, first = [], []
        for tag in _some("tags", given.tags):
            trigger = next((trigger for trigger in triggers if tag.begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"none of the triggers {given.triggers} is at the beginning of {tag.begin!r}")
            rest = self._tag(tag, tag.begin.removeprefix(trigger))
            following.append(self._sequence([_Part(triggers[trigger]), rest]))
            first.append(self._tag(tag))
        any_following, any_first = self._choice(following), self._choice(first)
        if given.stop_after_first:
            return any_first if given.at_least_one else self._choice([any_following, _Part("TEXT", False, True, True)])
        if any_following.open_ended or any_first.open_ended:
            raise ValueError("triggered_tags whose tags hold a regex or a choice are not supported")
        free = _Part(f"({self._symbol(any_following)})* TEXT", open_ended=True, takes_all=True)
        return self._sequence([_Part(self._symbol(any_first)), free]) if given.at_least_one else free

    def _separated(self, given: _TagsWithSeparator) -> _Part:
        tag = self._choice([self._tag(tag) for tag in _some("tags", given.tags)])
        more = self._sequence([self._text(given.separator), tag])
        if tag.regular and more.regular:
            text = tag.text if given.stop_after_first else f"{tag.text} ({more.text})*"
            return _Part(text if given.at_least_one else f"({text})?", regular=True, open_ended=True)
        if tag.open_ended:
            raise ValueError("tags_with_separator whose tags hold a regex or a choice is not supported")
        tag_symbol, more_symbol = self._symbol(tag), self._symbol(more)
        text = tag_symbol if given.stop_after_first else f"{tag_symbol} ({more_symbol})*"
        return _Part(self._define("tags", text if given.at_least_one else f"({text})?"))

    def _symbol(self, part: _Part) -> str:
        """The part as it stands in a rule."""
        if part.takes_all:
            return self._define("rest", part.text)
        return self._define("TERMINAL" if part.regular else "part", part.text)

    def _define(self, kind: str, text: str, lazy: bool = False) -> str:
        name = f"{kind}_{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {text}")
        return name


def format_grammar(
    given: StructuralFormat, json_rule: Callable[[Any], str], special_token: Callable[[str], str | None]
) -> str:
    """Raises ValueError, naming it, for a format that the notation cannot say exactly."""
    translation = _Translation(json_rule, special_token)
    start = translation._symbol(translation.of(given.format))
    return "\n".join(["%llguidance {}", f"start: {start}", f"TEXT: {_FREE_TEXT}", *translation.lines])


def _delimited(pattern: str) -> str:
    """The regex as the notation has it, between slashes and on one line."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL)
    return "/" + escaped.replace("\n", "\\n") + "/"


def _some(name: str, items: Sequence[Any]) -> Sequence[Any]:
    if not items:
        raise ValueError(f"{name} must not be empty")
    return items
