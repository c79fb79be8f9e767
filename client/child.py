"""A child process and how it ended, told rightly even where somebody else takes its exit status. Used by the launcher.

Where a program ignores SIGCHLD the system discards its children's exit statuses, and a program may reap all children
itself; `subprocess` takes either for an exit with code 0.
"""

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import threading
import time

POLL_INTERVAL = 0.001  # seconds between two looks

_PIDFD_GET_INFO = 0xC040FF0B  # an ioctl, since Linux 6.13
_PIDFD_INFO = struct.Struct("=QQ11Ii")  # mask, ..., exit status as from waitpid()
_PIDFD_INFO_EXIT = 1 << 3  # in its mask: the exit status, since Linux 6.15


class ChildProcess:
    """Thread-safe. `exit_code` is as `Popen.returncode`, but None where nobody can tell it any more."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid = process.pid
        self.exit_code: int | None = None
        self._process = process
        self._lock = threading.Lock()
        self._handle: int | None = None
        with contextlib.suppress(OSError):  # too few descriptors, an old system
            self._handle = os.pidfd_open(self.pid)

    def has_exited(self) -> bool:
        """Does not wait."""
        with self._lock:
            if self._process.returncode is None:
                try:
                    if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                        return False
                except ChildProcessError:
                    self.exit_code = self._lost_exit_code()
                    self._process.wait()
                else:
                    self.exit_code = self._process.wait()
                if self._handle is not None:
                    os.close(self._handle)
            return True

    def wait(self, timeout: float) -> bool:
        """Whether it has exited within so many seconds."""
        deadline = time.monotonic() + timeout
        while not self.has_exited():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_INTERVAL)
        return True

    def kill(self) -> None:
        with self._lock:
            if self._process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                if self._handle is None:
                    os.kill(self.pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _lost_exit_code(self) -> int | None:
        """From the system's own record of the process, if it keeps one."""
        if self._handle is None:
            return None
        question = _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13)
        try:
            mask, *_, status = _PIDFD_INFO.unpack(fcntl.ioctl(self._handle, _PIDFD_GET_INFO, question))
        except OSError:
            return None
        return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None
