"""Core processes: started and ended by their owner, watched by others. `CoreConnection` adds the sockets.

A core is a fresh interpreter, never a fork and never a second run of the user's main module, so it can be started from
a script without a guard, a notebook, a daemonic worker, or a process whose threads hold locks.
"""

import contextlib
import logging
import math
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from typing import TypeVar

import psutil

from ..protocol import envs
from ..protocol.channel import Channel
from ..protocol.errors import ProtocolError
from ..protocol.outputs import (
    STACKS_FILE,
    HandshakeFailed,
    HandshakeHello,
    HandshakeInit,
    HandshakeLeaving,
    HandshakeMessage,
    HandshakeReady,
)
from .remote_errors import rebuild_exception
from .spawn import start_core

logger = logging.getLogger("corespan.client")

M = TypeVar("M")

PROGRESS_INTERVAL = 10.0  # seconds between two lines of log while a core starts
SHORTEST_WAIT = 0.001  # seconds; to a socket, 0 means something else
EXIT_GRACE = 5.0  # seconds an idle core has to leave before it is killed
NUM_FILE_DESCRIPTORS = 48  # more than a connection and the start of its core take
MAX_IPC_PATH_BYTES = 100  # of the 107 the system has, less a file name's


class CoreProcess:
    """One core, from its start to its end. `ready` holds its final figures."""

    def __init__(self, init: HandshakeInit) -> None:
        """Returns when the model is loaded.

        Raises what the core's start raised, with the core's traceback as a note; RuntimeError when the core vanished or
        there is no interpreter to run it; TimeoutError after VLLM_ENGINE_READY_TIMEOUT_S; ProtocolError for words that
        make no sense.
        """
        self.owner_pid = os.getpid()
        self._socket_dir = init.socket_dir
        self._final_message: HandshakeFailed | HandshakeLeaving | None = None
        self._channel_lock = threading.Lock()
        started = start_core()
        self.channel = Channel(started.endpoint)
        self._process = started.process
        try:
            self.ready = self._handshake(init)
        except BaseException:
            self.kill()
            self.channel.close()
            raise

    def _handshake(self, init: HandshakeInit) -> HandshakeReady:
        deadline = time.monotonic() + envs.VLLM_ENGINE_READY_TIMEOUT_S
        try:
            self._expect(HandshakeHello, deadline)
            with contextlib.suppress(ConnectionError):  # when the core is gone, what comes next is its end
                self.channel.send(init, max(deadline - time.monotonic(), SHORTEST_WAIT))
            return self._expect(HandshakeReady, deadline)
        except TimeoutError:
            raise TimeoutError(
                f"The engine core was not ready after {envs.VLLM_ENGINE_READY_TIMEOUT_S:g} s "
                "(VLLM_ENGINE_READY_TIMEOUT_S)"
            ) from None

    def _expect(self, message_type: type[M], deadline: float) -> M:
        message = self._next_message(deadline)
        if isinstance(message, HandshakeFailed):
            raise rebuild_exception(message.error_type, message.message, f"In the engine core:\n{message.traceback}")
        if not isinstance(message, message_type):
            raise ProtocolError(f"expected {message_type.__name__} from the core, got {type(message).__name__}")
        return message

    def _next_message(self, deadline: float) -> HandshakeMessage:
        started = time.monotonic()
        while not self.channel.poll(min(deadline - time.monotonic(), PROGRESS_INTERVAL)):
            if time.monotonic() >= deadline:
                raise TimeoutError
            logger.info("The engine core has been starting for %.0f s", time.monotonic() - started)
        try:
            return self.channel.receive(deadline - time.monotonic())
        except EOFError:
            raise RuntimeError(f"The engine core did not start: {self._wait_for_exit_status()}") from None

    def poll_death(self) -> bool:
        """Whether the process is at its end; does not wait. To be asked when `channel` becomes readable."""
        with self._channel_lock:
            while self.channel.poll(0):
                try:
                    message = self.channel.receive()
                except (EOFError, OSError, ProtocolError):
                    return True
                if isinstance(message, HandshakeFailed | HandshakeLeaving):
                    self._final_message = message
        return False

    def is_leaving(self) -> bool:
        """Whether the core, which is at its end, leaves in order: then its last message to its clients says so."""
        self.poll_death()
        return self._final_message is not None

    def was_killed(self) -> bool:
        """Whether the process, which is at its end, left by SIGKILL and not of itself. Waits for its exit."""
        self._process.wait(EXIT_GRACE)
        return self._final_message is None and self._process.exit_code == -signal.SIGKILL

    def cause_of_death(self) -> str:
        """What the core said last, or how its process ended and where its threads stood. Waits for its exit."""
        if isinstance(self._final_message, HandshakeFailed):
            return self._final_message.traceback
        status = self._wait_for_exit_status()
        stacks = self._read_stacks()
        return f"{status}\n{stacks}" if stacks else status

    def _wait_for_exit_status(self) -> str:
        if not self._process.wait(EXIT_GRACE):
            return f"process {self._process.pid} closed its channel without leaving"
        code = self._process.exit_code
        if code is None:
            return f"process {self._process.pid} ended and somebody else, or the system, took its exit status"
        if code < 0:
            return f"process {self._process.pid} was killed by {_signal_name(-code)}"
        return f"process {self._process.pid} exited with code {code}"

    def _read_stacks(self) -> str:
        try:
            with open(os.path.join(self._socket_dir, STACKS_FILE), errors="replace") as stacks:
                return stacks.read()
        except OSError:
            return ""

    def wait_for_exit(self, drain_timeout: float) -> None:
        """Waits until the core, which was asked to leave, has drained and left; kills it when it has not in time."""
        if not self._process.wait(drain_timeout + EXIT_GRACE):
            logger.warning("The engine core does not leave and is killed")
        self.kill()

    def kill(self) -> None:
        """Ends the process and all it started, at once."""
        if not self._process.has_exited():
            for process in _process_tree(self._process.pid):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self._process.kill()
            self._process.wait(math.inf)


class ForeignProcess:
    """A core that another process owns, as seen by one more client of it: like `CoreProcess`, but for what only the
    owner may do, start it and end it.
    """

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError when there is no such process."""
        self.owner_pid = os.getpid()
        self.channel = ProcessHandle(pid)
        self._pid = pid

    def poll_death(self) -> bool:
        """Whether the process has ended; does not wait."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        return bool(poller.poll(0))

    def is_leaving(self) -> bool:
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


class ProcessHandle:
    """Becomes readable when the process ends."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time signals have no names of their own
        return f"signal {number}"


def require_file_descriptors() -> None:
    """Raises OSError (EMFILE) when a connection could run out of them half-way, where ZMQ would abort the process."""
    taken: list[int] = []
    try:
        for _ in range(NUM_FILE_DESCRIPTORS):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in taken:
            os.close(descriptor)


def make_socket_dir() -> str:
    """A new folder that only this user can enter, under VLLM_RPC_BASE_PATH or the system's temporary folder.

    Raises ValueError when the path is too long for an ipc socket.
    """
    socket_dir = tempfile.mkdtemp(prefix="corespan-", dir=envs.VLLM_RPC_BASE_PATH)
    if len(os.fsencode(socket_dir)) > MAX_IPC_PATH_BYTES:
        shutil.rmtree(socket_dir, ignore_errors=True)
        raise ValueError(
            f"{socket_dir} is too long for ipc sockets (at most {MAX_IPC_PATH_BYTES} bytes); "
            "set VLLM_RPC_BASE_PATH to a shorter folder"
        )
    return socket_dir


def _process_tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants, itself first, so that it starts no more of them. Empty where it has ended, or
    where this process can open no more files to look.
    """
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except (psutil.NoSuchProcess, OSError):
        return []
