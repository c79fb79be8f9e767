"""Runs a vLLM script as it is. Behind `corespan run-vllm`."""

import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType

ALIAS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_alias")
"""A folder whose `vllm` is this package. It is on the path of the script's process, and so of its core and children."""


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Runs the file as `python path arguments` would, in this process. Raises what it raises; OSError for no file."""
    with io.open_code(path) as script:
        code = compile(script.read(), path, "exec")
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv[:] = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(main.__file__)
    sys.path.insert(0, ALIAS)
    exec(code, main.__dict__)
