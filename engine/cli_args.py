"""`EngineArgs` on a command line: an option for every field, and back. Behind `add_cli_args` and `from_cli_args`."""

import argparse
import collections.abc
import dataclasses
import json
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .neutral_args import NeutralArgs

_SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}


def option(default: Any, help: str) -> Any:
    """A field with what --help says of it; the default follows in brackets where there is one and `help` has none."""
    return dataclasses.field(default=default, metadata={"help": help})


def add_field_arguments(parser: argparse.ArgumentParser, cls: type[NeutralArgs]) -> None:
    """An option for every field of the dataclass, such as --max-model-len, with the field's default; none for options
    of former versions of vLLM.
    """
    engine = parser.add_argument_group("engine")
    neutral = parser.add_argument_group("options of vLLM that mean nothing here, accepted at the values shown")
    hints, defaults = get_type_hints(cls), cls()
    for each in dataclasses.fields(cls):
        if each.metadata.get("former"):
            continue
        flags = ["--" + each.name.replace("_", "-"), *filter(None, [_SHORT.get(each.name)])]
        default = getattr(defaults, each.name)
        if "neutral" in each.metadata:
            kind = bool if any(isinstance(value, bool) for value in each.metadata["neutral"]) else object
            shown = " or ".join(map(str, each.metadata["neutral"]))
            because = str(each.metadata["because"]).replace("%", "%%")
            neutral.add_argument(*flags, default=default, help=f"{shown}: {because}", **_reading(kind))
        else:
            described = str(each.metadata["help"]).replace("%", "%%")
            if default not in (None, "") and default is not False and not described.endswith("]"):
                described += " [%(default)s]"
            engine.add_argument(*flags, default=default, help=described, **_reading(hints[each.name]))


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, `NoneType` among them; any other type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse is to read a value of this type."""
    kinds = [kind for kind in kinds_of(hint) if kind is not types.NoneType]
    kind, origin = kinds[0], get_origin(kinds[0])
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if kinds in ([int], [float]):
        return {"type": kind}
    if origin is Literal:
        return {"choices": get_args(kind)}
    if any(get_origin(each) is dict for each in kinds):
        return {"type": json.loads, "metavar": "JSON"}
    if origin is collections.abc.Sequence:
        return {"nargs": "+"}
    return {"type": _json_or_text if kind is object else str}


def _json_or_text(text: str) -> object:
    """A number, a list, `null` and the like are JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "None" else text
