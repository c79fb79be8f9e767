"""A core process from its first line to its exit code. `client.process` starts `main` in a new interpreter.

The process belongs to its parent: when that ends, for whatever reason and whatever is going on here, it leaves at once
and takes its socket folder along.
"""

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable

import psutil

from ..protocol import envs
from ..protocol.channel import Channel
from ..protocol.errors import text_of
from ..protocol.outputs import STACKS_FILE, HandshakeFailed, HandshakeHello, HandshakeInit, HandshakeLeaving
from ..protocol.user_classes import accept_user_code

logger = logging.getLogger("corespan.core")


def main(channel_fd: int, parent_pid: int) -> None:
    """Runs a core until it is told to leave. Exits with 0 then, with 1 after a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; this process leaves when the parent says so
    channel = Channel(socket.socket(fileno=channel_fd))
    channel.send(HandshakeHello())
    _import_ahead()
    init = channel.receive()
    if not isinstance(init, HandshakeInit):
        sys.exit(f"expected the configuration, got a {type(init).__name__}")
    ParentWatch(channel, parent_pid, init).start()
    try:
        _configure_logging()
        stacks = open(os.path.join(init.socket_dir, STACKS_FILE), "wb")  # stays open for faulthandler
        faulthandler.enable(stacks)
        accept_user_code(init.user_main, init.pickled_classes)
        from .engine_core_proc import EngineCoreProc

        core = EngineCoreProc(init, stacks)
    except BaseException as error:
        channel.send(failure(error))
        sys.exit(1)
    drain_timeout = core.vllm_config.parallel_config.shutdown_timeout
    TerminationWatch(lambda: core.request_shutdown(drain_timeout)).start()
    channel.send(core.ready_message())
    fault = core.run()
    if fault is not None:
        channel.send(failure(fault))
        sys.exit(1)
    with contextlib.suppress(OSError):  # nobody is there any more to be told
        channel.send(HandshakeLeaving())


def _import_ahead() -> None:
    """What a core needs, while the parent may still be busy. What fails will fail again, where that is reported."""
    with contextlib.suppress(Exception):
        from . import engine_core_proc  # noqa: F401
        from .worker import worker  # noqa: F401


def failure(error: BaseException) -> HandshakeFailed:
    return HandshakeFailed(type(error).__name__, text_of(error), "".join(traceback.format_exception(error)))


class ParentWatch(threading.Thread):
    """Waits for the parent's end, and then ends this process."""

    def __init__(self, channel: Channel, parent_pid: int, init: HandshakeInit) -> None:
        super().__init__(name="core-parent-watch", daemon=True)
        self._channel = channel
        self._parent_pid = parent_pid
        self._init = init

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        parent = self._open_parent()
        if parent is not None:
            poller.register(parent, select.POLLIN)
        if os.getppid() == self._parent_pid:
            poller.poll()  # the parent says nothing more, so whatever comes is the end
        self._leave()

    def _open_parent(self) -> int | None:
        """The channel's end alone does not show the parent's death when a fork of the parent holds a copy of it."""
        try:
            return os.pidfd_open(self._parent_pid)
        except OSError:
            return None

    def _leave(self) -> None:
        remove_socket_dir(self._init)
        try:
            self._channel.close()  # a descriptor to look around with, should there be no other
            for child in psutil.Process().children(recursive=True):
                child.kill()
        finally:
            os._exit(1)


def remove_socket_dir(init: HandshakeInit) -> None:
    """By the names of what is in it: to list a folder takes descriptors, and there may be none."""
    addresses = (*init.input_addresses, *init.output_addresses)
    sockets = [address.removeprefix("ipc://") for address in addresses if address.startswith("ipc://")]
    for path in (*sockets, os.path.join(init.socket_dir, STACKS_FILE)):
        with contextlib.suppress(OSError):
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(init.socket_dir)


class TerminationWatch(threading.Thread):
    """Calls `action` when SIGTERM comes. To be made in the main thread.

    A handler alone will not do: it runs in the main thread, between two instructions, and where that is about to block
    in a queue it would not run before something else comes along.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(name="core-termination-watch", daemon=True)
        self._action = action
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        signal.set_wakeup_fd(self._writing.fileno())
        signal.signal(signal.SIGTERM, lambda *_: None)

    def run(self) -> None:
        while self._reading.recv(1):
            self._action()


def _configure_logging() -> None:
    logging.basicConfig(
        level=envs.VLLM_LOGGING_LEVEL, format="%(levelname)s %(asctime)s [core %(process)d] %(message)s", force=True
    )
