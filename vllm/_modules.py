"""Makes the modules of `_table`: all at once, so that any import statement finds them, empty till a name is used."""

import importlib
import importlib.abc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from ._table import MISSING, NAMES

_PACKAGE = __package__.rpartition(".")[0]


def make_modules(root: str) -> None:
    """Puts every module of the table, and those above them, into `sys.modules`, below the package `root`."""
    for path in sorted({each for row in (*NAMES, *MISSING) for each in _with_parents(row[0])}):
        module = ModuleType(f"{root}.{path}", f"vLLM's names of `vllm.{path}`.")
        module.__path__ = []  # a package: what is imported below it and is not there is a ModuleNotFoundError
        module.__dict__["__getattr__"] = lambda name, module=module, path=path: value_of(module.__name__, path, name)
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)
    sys.meta_path.append(NoCounterpart(root))


class NoCounterpart(importlib.abc.MetaPathFinder):
    """Asked last, for modules of vLLM's that nothing else finds: says that it is not vLLM's installation."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, name: str, *args: object) -> None:
        if name.startswith(self._prefix):
            raise ModuleNotFoundError(f"{name} has no counterpart in corespan", name=name)


def call_it_vllm(root: str) -> None:
    """From now on, in this process, `vllm` and all below it are the package `root` and what is below that."""
    for name, module in list(sys.modules.items()):
        if name == root or name.startswith(f"{root}."):
            sys.modules["vllm" + name.removeprefix(root)] = module
    sys.meta_path.append(NoCounterpart("vllm"))


def value_of(module_name: str, path: str, name: str) -> Any:
    """What `vllm.<path>.<name>` is here, kept in that module. Raises AttributeError for what is not in the table."""
    for theirs, source, ours in _entries(path):
        if theirs == name:
            value = _missing(path, name, ours) if source is None else getattr(_import(source), ours)
            setattr(sys.modules[module_name], name, value)
            return value
    if name == "__all__":
        return [theirs for theirs, *_ in _entries(path)]
    if name.startswith("__"):
        raise AttributeError(name)
    for row_path, source, names in NAMES:
        if (row_path, names) == (path, "*"):
            return getattr(_import(source), name)
    raise AttributeError(f"vllm{path and '.'}{path} has no {name!r} in corespan")


def _entries(path: str) -> Iterator[tuple[str, str | None, str]]:
    """(vLLM's name, module, its name there) of what one of vLLM's modules has; (name, None, why) of the missing."""
    for row_path, source, names in NAMES:
        if row_path == path and names != "*":
            for name in names.split():
                theirs, _, ours = name.partition("=")
                yield theirs, source, ours or theirs
        elif row_path == path and source != "protocol.envs":
            yield from ((name, source, name) for name in _import(source).__all__)
    for row_path, names, why in MISSING:
        if row_path == path:
            yield from ((name, None, why) for name in names.split())


def _with_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _import(source: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{source}")


def _missing(path: str, name: str, why: str) -> Any:
    """Stands in for a name that is imported and may never be used: not even an instance of it exists."""
    message = f"vllm{path and '.'}{path}.{name} has no counterpart in corespan: {why}"

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(message)

    def lookup(cls: type, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise NotImplementedError(message)

    kind = type("Missing", (type,), {"__getattr__": lookup, "__call__": refuse})
    return kind(name, (), {"__module__": f"vllm.{path}", "__doc__": message, "__init_subclass__": refuse})
