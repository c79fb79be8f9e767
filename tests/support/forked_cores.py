"""Cores of tests, forked from a server that has imported torch: a start takes a tenth of a second instead of three.

What a program starts is a fresh interpreter. The tests of starting and of ending (tests/client, and whatever runs a
program of its own) start that too.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

import corespan.client.spawn as spawn_module

LARGEST_ORDER = 1 << 17  # bytes; as much as a socket takes at once
_CLONE_PARENT = 0x8000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "LD_")
_PID = struct.Struct("=q")


class ForkedCore:
    """What `CoreProcess` uses of `subprocess.Popen`. The process is this one's own child, as the real one is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                self.returncode = 0
        return self.returncode


class CoreServer:
    """The server's end in the test's process. The server leaves when this process does."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = {**spawn_module.core_environment(), "OPENBLAS_NUM_THREADS": "1"}
        code = "import sys; sys.path[:] = sys.argv[2:]; from forked_cores import serve; serve(int(sys.argv[1]))"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                env=self._environment,
            )

    def start(self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **options: Any) -> Any:
        """In the place of `subprocess.Popen`, which it leaves what libraries would have to be loaded anew for."""
        order = json.dumps([command[4], command[5:], env, os.getcwd()]).encode()
        if self._read_at_import(env) != self._read_at_import(self._environment) or len(order) > LARGEST_ORDER:
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, **options)
        socket.send_fds(self._channel, [order], [*pass_fds, 1, 2])
        (pid,) = _PID.unpack(self._channel.recv(_PID.size))
        return ForkedCore(pid)

    def close(self) -> None:
        self._channel.close()
        self.process.wait()

    @staticmethod
    def _read_at_import(environment: dict[str, str]) -> dict[str, str]:
        return {name: text for name, text in environment.items() if name.startswith(_READ_AT_IMPORT)}


@contextlib.contextmanager
def forked_cores() -> Iterator[CoreServer]:
    """Within it cores are forked."""
    server = CoreServer()
    real = spawn_module.subprocess
    spawn_module.subprocess = types.SimpleNamespace(Popen=server.start, DEVNULL=real.DEVNULL)  # type: ignore[assignment]
    try:
        yield server
    finally:
        spawn_module.subprocess = real
        server.close()


def serve(descriptor: int) -> None:
    """Forks a core for every order. Returns in the server at its end, and in a core at that core's."""
    import corespan.core.engine_core_proc
    import corespan.core.process_main
    import corespan.core.runtime.cpu_torch  # with torch, which a real core loads where it is used
    import corespan.core.worker.worker  # noqa: F401

    assert os.listdir("/proc/self/task") == [str(os.getpid())], "a fork would lose threads"
    gc.freeze()
    with socket.socket(fileno=descriptor) as channel:
        while True:
            order, descriptors, *_ = socket.recv_fds(channel, LARGEST_ORDER, 3)
            if not order:
                return
            pid = _fork()
            if pid == 0:
                break
            for each in descriptors:
                os.close(each)
            channel.send(_PID.pack(pid))
    _become_core(order, *descriptors)


def _fork() -> int:
    """`os.fork()`, but the child is a child of this process's parent."""
    api = ctypes.pythonapi
    number = _SYS_CLONE[os.uname().machine]
    api.PyOS_BeforeFork()
    pid = int(api.syscall(number, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("clone failed")
    return pid


def _become_core(order: bytes, channel: int, stdout: int, stderr: int) -> None:
    parent_pid, path, environment, folder = json.loads(order)
    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    with open(os.devnull, "rb") as stdin:
        for source, target in ((stdin.fileno(), 0), (stdout, 1), (stderr, 2)):
            os.dup2(source, target)
    os.close(stdout)
    os.close(stderr)
    from corespan.core.process_main import main

    code = 1
    try:
        main(channel, int(parent_pid))
        code = 0
    except SystemExit:
        pass  # after a failure, of which its parent has been told
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # what torch has loaded need not be taken apart piece by piece
