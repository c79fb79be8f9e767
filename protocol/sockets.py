"""The ZMQ sockets of the bridge, as both ends make them and read from them.

They are unix sockets or, where the configuration names an address, TCP under CurveZMQ: both ends then hold keys that
were made for this one engine, and whoever holds none of them can neither send nor read.
"""

import hmac
import os

import zmq

from . import codec
from .codec import Buffer
from .errors import ProtocolError
from .outputs import CurveKeys

CURVE_OVERHEAD_BYTES = 64  # by which a frame is longer, at most, while it is encrypted
MAX_READY_BYTES = 1 << 16  # all that a core ever sends to the request socket is that it is ready
MAX_READY_MESSAGES = 16
TOKEN_BYTES = 16
OUTPUT_LINGER_MS = 4000
ZAP_DOMAIN = b"corespan"


def make_curve_keys() -> tuple[CurveKeys, CurveKeys]:
    """New keys for the two ends of one engine."""
    (one_public, one_secret), (other_public, other_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    return CurveKeys(one_public, one_secret, other_public), CurveKeys(other_public, other_secret, one_public)


def identity(engine_index: int, token: bytes) -> bytes:
    """What a core calls itself on its clients' request sockets. Nobody else knows it, so nobody takes its place."""
    return engine_index.to_bytes(2, "little") + token


def bind(
    context: "zmq.Context[zmq.Socket[bytes]]", socket_type: int, address: str, keys: CurveKeys | None = None
) -> "zmq.Socket[bytes]":
    """A client's end. Larger frames than a core sends end the connection of whoever sends them.

    With `keys`, peers are let in by whoever answers ZAP requests in `context`, and nobody is where nobody answers.
    Raises OSError.
    """
    socket = context.socket(socket_type)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    if socket_type == zmq.ROUTER:
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_READY_BYTES)
        socket.setsockopt(zmq.RCVHWM, MAX_READY_MESSAGES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a request for a core that is gone is an error, not a silent loss
    else:
        socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES + CURVE_OVERHEAD_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.IPV6, _is_ipv6(address))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        number = error.errno or 0
        raise OSError(number, os.strerror(number), address) from error
    return socket


def bound_address(socket: "zmq.Socket[bytes]") -> str:
    """Where the other end connects to; over TCP the system has chosen the port."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]",
    socket_type: int,
    address: str,
    own_identity: bytes = b"",
    keys: CurveKeys | None = None,
) -> "zmq.Socket[bytes]":
    """A core's end. What it sent last is still delivered while it exits."""
    socket = context.socket(socket_type)
    socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES + CURVE_OVERHEAD_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, OUTPUT_LINGER_MS if socket_type == zmq.PUSH else 0)
    if own_identity:
        socket.setsockopt(zmq.IDENTITY, own_identity)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.peer_key)
    socket.setsockopt(zmq.IPV6, _is_ipv6(address))
    socket.connect(address)
    return socket


def _is_ipv6(address: str) -> bool:
    return address.startswith("tcp://[")


def receive_frames(socket: "zmq.Socket[bytes]", flags: int = 0) -> list[Buffer]:
    """One message. The first frame (small) is copied out, the others stay where ZMQ put them.

    Raises zmq.Again with `zmq.NOBLOCK` when there is none.
    """
    frame = socket.recv(flags, copy=False)
    frames: list[Buffer] = [frame.bytes]
    while frame.more:  # asking the socket instead takes as long as receiving
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames


class OutputSeal:
    """The first frame of every message of outputs: a token that only the core and its clients know, and a running
    number. Other processes of the same user can reach the output socket; this tells what they send, or send again, from
    what the core sends. One of these at each end.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._count = 0

    def next(self) -> bytes:
        self._count += 1
        return self._token + self._count.to_bytes(8, "little")

    def check(self, frames: list[Buffer]) -> list[Buffer]:
        """The frames behind the seal. Raises ProtocolError when it is not the one that is due."""
        seal = bytes(frames[0])
        if not hmac.compare_digest(seal[:TOKEN_BYTES], self._token) or len(seal) != TOKEN_BYTES + 8 or len(frames) < 2:
            raise ProtocolError("a message that is not from the core")
        count = int.from_bytes(seal[TOKEN_BYTES:], "little")
        if count <= self._count:
            raise ProtocolError("a message that has been received before")
        self._count = count
        return frames[1:]
