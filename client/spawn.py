"""Starts the interpreter of a core: for `CoreProcess`, or ahead of it, so that the core's imports and the shell's own
preparations take place at the same time. Imports little, to be called early.
"""

import contextlib
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ..protocol import envs
from .child import ChildProcess
from .cpus import available_cores, thread_places
from .interpreter import interpreter
from .standard_streams import fill_standard_descriptors

_SPINS_BETWEEN_STEPS = "10000"  # of OpenMP's threads, a few 100 us; then they leave the cores to others
_SECRET_WORDS = frozenset(
    ("TOKEN", "SECRET", "KEY", "APIKEY", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS")
)
_THREAD_PLACING = frozenset(("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"))
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_ROOT_PACKAGE = __package__.rpartition(".")[0]
_MAIN = f"from {_ROOT_PACKAGE}.core.process_main import main; main(int(sys.argv[1]), int(sys.argv[2]))"
_BOOTSTRAP = f"import sys; sys.path[:] = sys.argv[3:]; {_MAIN}"
_BOOTSTRAP_ELSEWHERE = f"import sys; sys.path += sys.argv[3:]; {_MAIN}"
"""In another interpreter than this process's, whose own packages go first."""


@dataclass(slots=True)
class Interpreter:
    """One that waits for a core's configuration at the other end of `endpoint`. It leaves where that is closed."""

    process: ChildProcess
    endpoint: socket.socket
    environment: dict[str, str]
    owner_pid: int

    def discard(self) -> None:
        if self.owner_pid == os.getpid():
            self.process.kill()
            self.process.wait(math.inf)
            self.endpoint.close()


_ahead: Interpreter | None = None


@contextlib.contextmanager
def core_ahead() -> Iterator[None]:
    """The engine that is made within gets an interpreter that is being started already."""
    global _ahead
    mine = None
    fill_standard_descriptors()  # ahead of the interpreter's socket, which would take the number of a closed stream
    with contextlib.suppress(RuntimeError, OSError):  # whoever needs it is told
        if envs.VLLM_ENABLE_V1_MULTIPROCESSING and _ahead is None:
            _ahead = mine = _start(core_environment())
    try:
        yield
    finally:
        if mine is not None and _ahead is mine:
            _ahead = None
            mine.discard()


def start_core() -> Interpreter:
    """The one that was started ahead, or a new one. Raises RuntimeError where there is no interpreter to run a core."""
    global _ahead
    environment = core_environment()
    ahead, _ahead = _ahead, None
    if ahead is not None:
        if ahead.owner_pid == os.getpid() and ahead.environment == environment:
            return ahead
        ahead.discard()
    return _start(environment)


def _start(environment: dict[str, str]) -> Interpreter:
    python = interpreter()
    bootstrap = _BOOTSTRAP if python == sys.executable else _BOOTSTRAP_ELSEWHERE
    own_end, core_end = socket.socketpair()
    with core_end:
        process = subprocess.Popen(
            [python, "-c", bootstrap, str(core_end.fileno()), str(os.getpid()), *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=[core_end.fileno()],
            env=environment,
            process_group=0,  # Ctrl-C in a terminal is the parent's alone
        )
    return Interpreter(ChildProcess(process), own_end, environment, os.getpid())


def core_environment() -> dict[str, str]:
    """This process's, without secrets: the core loads files that are there and speaks to nobody but its clients."""
    environment = {name: text for name, text in os.environ.items() if not _is_secret(name, text)}
    environment.setdefault("OMP_NUM_THREADS", str(available_cores()))
    places = thread_places()
    if places is not None and _THREAD_PLACING.isdisjoint(environment):
        environment |= {"OMP_PLACES": places, "OMP_PROC_BIND": "close"}
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS_BETWEEN_STEPS)
    return environment


def _is_secret(name: str, text: str) -> bool:
    """Whether an environment variable's name says so, such as HF_TOKEN or AWS_SECRET_ACCESS_KEY, or it holds a URL with
    a password.
    """
    return not _SECRET_WORDS.isdisjoint(name.upper().split("_")) or _URL_WITH_PASSWORD.search(text) is not None
