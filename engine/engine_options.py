"""`LLM`'s options: those of `EngineArgs`, in the constructor's signature, for type checkers, editors and `help`."""

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

from .engine_args import EngineArgs
from .metrics.loggers import StatLoggerFactory
from .neutral_args import NeutralArgs

P = ParamSpec("P")


@dataclass
class LLMArgs(EngineArgs):
    """What `LLM` is built with."""

    model: str | os.PathLike[str] = field()  # no default
    disable_log_stats: bool = True
    stat_loggers: Sequence[StatLoggerFactory] = ()


def takes_options_of(
    args: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorates an `__init__(self, model, **options)`. To a type checker it takes what the class `args` takes; `help`
    shows the options that have a meaning.
    """
    without_meaning = {option.name for option in dataclasses.fields(NeutralArgs)}
    model, *options = inspect.signature(args).parameters.values()
    shown = [each.replace(kind=each.KEYWORD_ONLY) for each in options if each.name not in without_meaning]

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own, _, others = inspect.signature(init).parameters.values()
        init.__signature__ = inspect.Signature([own, model, *shown, others])  # type: ignore[attr-defined]
        return init

    return decorate


def refuse_unknown_options(given: Mapping[str, object]) -> None:
    """Raises TypeError for an option that `LLM` does not have, with the one that may be meant."""
    known = [option.name for option in dataclasses.fields(LLMArgs)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise TypeError(
                f"LLM got an unexpected keyword argument {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
