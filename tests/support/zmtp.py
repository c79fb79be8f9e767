"""ZMQ's wire protocol by hand, for what no ZMQ socket would send."""

import socket

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)


def connect_raw(address: str, socket_type: bytes, timeout: float) -> socket.socket:
    """A connection to an ipc address on which the peer believes to have a ZMQ socket of that type before it."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout)
    connection.connect(address.removeprefix("ipc://"))
    body = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    connection.sendall(GREETING + b"\x04" + bytes([len(body)]) + body)
    return connection


def frame(content: bytes, claimed_length: int | None = None) -> bytes:
    """The last frame of a message; it may claim to be longer than it is."""
    length = len(content) if claimed_length is None else claimed_length
    return b"\x02" + length.to_bytes(8, "big") + content
