"""A core that another process owns, as seen by one more client of it."""

import os
import select


class ProcessHandle:
    """Becomes readable when the process ends."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError when there is no such process."""
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class AttachedCore:
    """Like `CoreProcess`, but for what only the owner may do: start it and end it."""

    def __init__(self, pid: int) -> None:
        self.owner_pid = os.getpid()
        self.channel = ProcessHandle(pid)
        self._pid = pid

    def poll_death(self) -> bool:
        """Whether the process has ended; does not wait."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        return bool(poller.poll(0))

    def said_goodbye(self) -> bool:
        """Not known here."""
        return False

    def was_killed(self) -> bool:
        """Not known here."""
        return False

    def cause_of_death(self) -> str:
        return f"process {self._pid} has ended; the client that started it knows more"

    def wait_for_exit(self, drain_timeout: float) -> None:
        """The core goes on for its other clients; this one's requests are aborted when its sockets close."""

    def kill(self) -> None:
        """Not this client's to do."""
