"""What an engine could leave behind: child processes, socket folders, threads."""

import glob
import os
import tempfile
import threading
import time

import psutil
from deadlines import DEADLINE

from corespan.protocol import envs


class Leftovers:
    """`found()` names whatever is there now and was not when this was made."""

    def __init__(self) -> None:
        self._socket_root = envs.VLLM_RPC_BASE_PATH or tempfile.gettempdir()
        self._before = set(self._present())

    def found(self) -> list[str]:
        """Gives what is on its way out the time to leave."""
        deadline = time.monotonic() + DEADLINE
        while (extra := sorted(set(self._present()) - self._before)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return extra

    def _present(self) -> list[str]:
        children = psutil.Process().children(recursive=True)
        threads = (thread for thread in threading.enumerate() if thread.name != "test-event-loop")
        return [
            *(f"process {child.pid}" for child in children),
            *(f"folder {path}" for path in glob.glob(os.path.join(self._socket_root, "corespan-*"))),
            *(f"thread {thread.name} {thread.ident}" for thread in threads),
        ]
