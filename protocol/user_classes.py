"""How classes of the user's get into a core: by a path "package.module:Class", even out of the script itself.

The shell names a class with `path_of`, both sides find it with `find_class`. A core in a process of its own gets a
`UserMain`, the script to look into for "__main__:Class", and, where that will not do, the class as a pickle.
"""

import importlib
import io
import operator
import os
import sys
import types
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from . import envs
from .codec import cloudpickle
from .errors import ProtocolError

T = TypeVar("T")
_MAIN_NAMES = ("__main__", "__mp_main__")
"""What a script is called: in its own process, and in one that runs it for its definitions only."""

_WHERE_TO_DEFINE = (
    "the core's process runs the script under another name and up to where it builds an engine: define the class "
    "before that and outside of `if __name__ == '__main__':`, or in a module of its own"
)


class UserMain(msgspec.Struct, frozen=True):
    """The script that the user's process runs, in a package where it was started with -m."""

    path: str
    package: str | None
    argv: list[str]


class ScriptReachedEngine(BaseException):
    """Ends a script in the core's process where it would build an engine: what an engine needs stands before that."""


_known: dict[str, object] = {}  # classes by path, of those that were handed to an engine in this process
_main: UserMain | None = None  # in a core's process: the user's script, which is not this process's own
_main_module: types.ModuleType | None = None  # and what became of it
_is_running_script = False


def path_of(cls: type) -> str:
    """ "package.module:Class", under which this process finds this very class from now on, be it local or redefined."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    _known[path] = cls
    return path


def find_class(path: str) -> object:
    """What a path names. Raises ImportError or AttributeError."""
    if path in _known:
        return _known[path]
    module_name, _, qualname = path.partition(":")
    module = _load_main() if module_name in _MAIN_NAMES else importlib.import_module(module_name)
    try:
        return operator.attrgetter(qualname)(module)
    except AttributeError as error:
        if module is _main_module:
            raise AttributeError(f"{error}; {_WHERE_TO_DEFINE}") from error
        raise


def load_class(path: str, base: type[T], what: str) -> type[T]:
    """The class that a path names: a `base`, for use as `what`. Raises ValueError that says what is wrong with it."""
    module_name, _, class_name = path.partition(":")
    if not (module_name and class_name):
        raise ValueError(f"{what} {path!r}: write it as 'package.module:Class'")
    try:
        loaded = find_class(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} {path!r} cannot be imported: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ValueError(f"{what} {path!r} is not a subclass of {base.__name__}")
    return loaded


def user_main() -> UserMain | None:
    """The script of this process; None where there is no file of it: a notebook, a prompt, `python -c`."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        return None
    spec = getattr(main, "__spec__", None)
    return UserMain(os.path.abspath(path), spec.parent if spec is not None else None, list(sys.argv))


def pickles_for_core(paths: Sequence[str]) -> dict[str, bytes]:
    """Pickles, by path, of the classes that another process finds in no module; if pickles are allowed, also of the
    script's.

    Raises ValueError that names the remedies, unless VLLM_ALLOW_INSECURE_SERIALIZATION=1; TypeError where
    cloudpickle is missing.
    """
    script_will_do = user_main() is not None and not envs.VLLM_ALLOW_INSECURE_SERIALIZATION
    pickles: dict[str, bytes] = {}
    for path in paths:
        module_name, _, qualname = path.partition(":")
        if "<locals>" not in qualname and (script_will_do or module_name not in _MAIN_NAMES):
            continue
        if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            raise ValueError(
                f"the class {path!r} is defined where the core's process cannot find it; put it at the top level of a "
                "module or script, or set VLLM_ENABLE_V1_MULTIPROCESSING=0 to run the core in this process, or "
                "VLLM_ALLOW_INSECURE_SERIALIZATION=1 to send it pickled"
            )
        pickles[path] = cloudpickle().dumps(find_class(path))
    return pickles


def accept_user_code(main: UserMain | None, pickles: dict[str, bytes]) -> None:
    """In a core's process: what `find_class` is to look into. Raises ProtocolError for pickles that are not allowed."""
    global _main, _main_module
    _main, _main_module = main, None
    if pickles and not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise ProtocolError("a pickled class, which VLLM_ALLOW_INSECURE_SERIALIZATION=1 would allow")
    _known.update({path: cloudpickle().loads(pickle) for path, pickle in pickles.items()})


def end_script_at_engine() -> None:
    """Called first where an engine is built."""
    if _is_running_script:
        raise ScriptReachedEngine


def _load_main() -> types.ModuleType:
    """The user's script as a module. A core's process runs it, once, under another name than __main__."""
    global _main_module
    if _main is None:
        return sys.modules["__main__"]
    if _main_module is None:
        _main_module = _run_script(_main)
    return _main_module


def _run_script(main: UserMain) -> types.ModuleType:
    """Raises ImportError, with what it raised as the cause, for a script that cannot be run to its end, or to where it
    builds an engine: that far it has to be run where it has no `if __name__ == "__main__":`.
    """
    global _is_running_script
    module = types.ModuleType("__mp_main__")
    module.__file__, module.__package__ = main.path, main.package
    sys.modules["__mp_main__"] = module  # dataclasses, for one, look their own module up
    sys.argv[:] = main.argv
    _is_running_script = True
    try:
        with io.open_code(main.path) as script:
            exec(compile(script.read(), main.path, "exec"), module.__dict__)
    except ScriptReachedEngine:
        pass
    except BaseException as error:  # a script can raise anything, SystemExit too
        raise ImportError(
            f"{main.path} fails where the core's process runs it for its definitions ({error!r}): put what it does "
            "under `if __name__ == '__main__':`, or the class into a module of its own"
        ) from error
    finally:
        _is_running_script = False
    return module
