"""Where a server listens: a port or a Unix socket, bound before anything else is done."""

import os
import socket
import stat

from .serve_options import ServeOptions

_BACKLOG = 2048


def bind(options: ServeOptions) -> socket.socket:
    """The bound socket. Raises OSError naming the address that cannot be had."""
    if options.uds is not None:
        return _bind_unix(options.uds)
    host = options.host or "0.0.0.0"
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, options.port))
        listener.listen(_BACKLOG)  # two of them may bind a port; only one may listen
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{options.port}: {_reason(error)}") from None
    return listener


def _bind_unix(path: str) -> socket.socket:
    """Takes the place of a socket that a dead server left; of nothing else."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_left_over(path):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o660)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {path}: {_reason(error)}") from None
    return listener


def _is_left_over(path: str) -> bool:
    """Whether it is a socket that nobody listens on."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def _reason(error: OSError) -> str:
    return error.strerror or str(error)  # a host without an address has no strerror


def address_of(options: ServeOptions, listener: socket.socket) -> str:
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"
