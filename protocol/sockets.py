"""The ZMQ sockets of the bridge, as both ends make them and read from them."""

import zmq

from .codec import Buffer

MAX_FRAME_BYTES = 1 << 31
OUTPUT_LINGER_MS = 4000


def identity(engine_index: int) -> bytes:
    """What a core calls itself on its clients' request sockets."""
    return engine_index.to_bytes(2, "little")


def bind(context: "zmq.Context[zmq.Socket[bytes]]", socket_type: int, address: str) -> "zmq.Socket[bytes]":
    """A client's end. Frames beyond `MAX_FRAME_BYTES` end the connection of whoever sends them."""
    socket = context.socket(socket_type)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    if socket_type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a request for a core that is gone is an error, not a silent loss
    else:
        socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]", socket_type: int, address: str, own_identity: bytes = b""
) -> "zmq.Socket[bytes]":
    """A core's end. What it sent last is still delivered while it exits."""
    socket = context.socket(socket_type)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, OUTPUT_LINGER_MS if socket_type == zmq.PUSH else 0)
    if own_identity:
        socket.setsockopt(zmq.IDENTITY, own_identity)
    socket.connect(address)
    return socket


def receive_frames(socket: "zmq.Socket[bytes]", flags: int = 0) -> list[Buffer]:
    """One message. The first frames (small) are copied out, array frames stay where ZMQ put them.

    Raises zmq.Again with `zmq.NOBLOCK` when there is none.
    """
    frames: list[Buffer] = [socket.recv(flags)]
    while socket.getsockopt(zmq.RCVMORE):
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames
