"""Renders a model's chat template, untrusted jinja2 code, in a sandbox. Called by the tokenizer.

A template meets the same environment as in transformers: the same filters, functions and whitespace rules.
"""

import datetime
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .conversation import plain_conversation, plain_tools, to_plain

_TEMPLATE_SIGNS = "{}\n"  # text without any of these is no template, but a name or a path
_CUT_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def choose_template(
    own: str | Mapping[str, str] | None, chosen: str | os.PathLike[str] | None, with_tools: bool
) -> str:
    """The text of a template. `own`: the model's, several by name. `chosen`: a caller's: one of these names, the path
    of a file, or a template's text; None: the model's own.

    Raises ValueError where there is none, or `chosen` is none of the three.
    """
    named = {"default": own} if isinstance(own, str) else dict(own or {})
    if chosen is not None:
        return named[chosen] if chosen in named else _chosen_text(chosen, sorted(named))
    for name in ("tool_use", "default") if with_tools else ("default",):
        if name in named:
            return named[name]
    if named:
        raise ValueError(
            f"this model has several chat templates and no default; pass one of the names {sorted(named)} as "
            "chat_template"
        )
    raise ValueError("this model has no chat template; pass one as chat_template")


def _chosen_text(chosen: str | os.PathLike[str], names: list[str]) -> str:
    path = os.path.expanduser(os.fspath(chosen))
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"the chat_template file {path} is not UTF-8 text: {error}") from error
    if isinstance(chosen, str) and any(sign in chosen for sign in _TEMPLATE_SIGNS):
        return chosen
    raise ValueError(
        f"chat_template is {os.fspath(chosen)!r}, which is neither a template's text nor the path of a file"
        + (f" nor one of this model's templates, {names}" if names else "")
    )


def render_chat_template(
    template: str,
    messages: Sequence[Any],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation.

    Raises ValueError where the template does not parse, fails or refuses the messages, TypeError and ValueError for
    messages, tools and variables that are none.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    conversation = plain_conversation(messages)
    plain_variables = {
        "documents": None,
        **{name: to_plain(value, f"the template variable {name!r}") for name, value in (variables or {}).items()},
        "messages": conversation,
        "tools": plain_tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    final_text = _mark_final_message(conversation) if continue_final_message else None
    try:
        rendered = _compile(template).render(plain_variables)
    except Exception as error:  # whatever the template's code runs into is the template's fault, or the messages'
        raise ValueError(f"the chat template failed: {error or type(error).__name__}") from error
    return rendered if final_text is None else _cut_at_mark(rendered, final_text)


def _mark_final_message(conversation: list[dict[str, Any]]) -> str:
    """Put the cut mark behind the last message's text, which is returned."""
    content = conversation[-1].get("content")
    if isinstance(content, str):
        conversation[-1]["content"] = content + _CUT_MARK
        return content
    for part in reversed(content or ()):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + _CUT_MARK
            return text
    raise ValueError("continue_final_message needs a text to continue in the last message")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    mark = _CUT_MARK.strip()
    if mark not in rendered or final_text.strip() not in rendered:
        raise ValueError("continue_final_message: the chat template does not write out the last message's text")
    position = rendered.rindex(mark)
    # Without the mark's trailing space the template has trimmed the message, so the continuation starts trimmed too.
    trimmed = not rendered.startswith(_CUT_MARK, position)
    return rendered[:position].rstrip() if trimmed else rendered[:position]


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here its body is just text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.lru_cache(maxsize=32)
def reads_content_parts(template: str) -> bool:
    """Whether the template goes through the parts of a message's content; most take it for text."""
    try:
        tree = _environment().parse(template)
    except jinja2.TemplateError:
        return False
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _names_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_names_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _names_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter):
        return _names_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
