"""Which Python runs a core, or pip. Asked before either is started: a frozen or embedded program that started
`sys.executable` would start itself, and that copy another, without end."""

import os
import re
import sys

_INTERPRETER_NAME = re.compile(r"python|pypy|graalpy", re.IGNORECASE)


def interpreter() -> str:
    """`sys.executable`, or what `multiprocessing.set_executable` names instead.

    Raises RuntimeError where neither is a Python interpreter: in programs that are frozen or embed Python, such as
    uWSGI, `sys.executable` is empty or the program itself.
    """
    named = _named_by_multiprocessing()
    if named is not None:
        if not _is_program(named):
            raise RuntimeError(f"multiprocessing.set_executable names {named!r}, which is no program that can be run")
        return named
    obstacle = _obstacle(sys.executable)
    if obstacle is not None:
        raise RuntimeError(
            f"no Python interpreter is known to start another process with: {obstacle}. Name one that has corespan "
            "installed: multiprocessing.set_executable('/path/to/python')"
        )
    return sys.executable


def _named_by_multiprocessing() -> str | None:
    spawn = sys.modules.get("multiprocessing.spawn")  # where nobody has imported it, nobody has named anything
    named = None if spawn is None else spawn.get_executable()
    if not named or os.fsdecode(named) == sys.executable:
        return None
    return os.fsdecode(named)


def _obstacle(executable: str | None) -> str | None:
    """Why this is no interpreter; None where it is one."""
    if getattr(sys, "frozen", False):
        return f"this program is frozen (sys.frozen is {sys.frozen!r})"  # type: ignore[attr-defined]
    if not executable:
        return f"sys.executable is {executable!r}"
    if not _is_program(executable):
        return f"sys.executable is {executable!r}, which is no program that can be run"
    if not _INTERPRETER_NAME.search(os.path.basename(executable)):
        return f"sys.executable is {executable!r}, a program that embeds Python"
    return None


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
