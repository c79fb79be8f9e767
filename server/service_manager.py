"""What a service manager is told of this process: systemd's notification protocol, where NOTIFY_SOCKET is set."""

import logging
import os
import socket

logger = logging.getLogger("corespan.server")


def notify(state: str) -> None:
    """Sends `READY=1`, `STOPPING=1` or the like. Does nothing without a manager that listens."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
    except OSError as error:
        logger.warning("The service manager at %s was not told %s: %s", path, state, error)
