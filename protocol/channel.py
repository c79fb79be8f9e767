"""The private line between a core process and whoever launched it: a socket pair that carries the handshake messages.

The core inherits its end, so there is no address to guess and no one else can speak. When either process ends, for
whatever reason, the other reads the end of the stream.
"""

import select
import socket
import time

import msgspec

from .errors import ProtocolError
from .outputs import HandshakeMessage

MAX_MESSAGE_BYTES = 1 << 28
_LENGTH_BYTES = 4


class Channel:
    """One end of the line. Sending and receiving may happen in different threads, each in one at a time."""

    def __init__(self, endpoint: socket.socket) -> None:
        self._socket = endpoint
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(HandshakeMessage)

    def fileno(self) -> int:
        """Readable when a message or the end of the stream is there."""
        return self._socket.fileno()

    def poll(self, timeout: float) -> bool:
        """Whether there is something to receive, if only the end of the stream, within `timeout` seconds."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(max(timeout, 0.0) * 1000))

    def send(self, message: HandshakeMessage, timeout: float | None = None) -> None:
        """Raises OSError when the other end is gone, TimeoutError where it has not taken the message in `timeout`
        seconds, ValueError for more than MAX_MESSAGE_BYTES.
        """
        payload = self._encoder.encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a configuration of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
        finally:
            self._socket.settimeout(None)

    def receive(self, timeout: float | None = None) -> HandshakeMessage:
        """The next message; waits at most `timeout` seconds (None: for ever).

        Raises EOFError when the other end is gone, TimeoutError, ProtocolError.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        length = int.from_bytes(self._read(_LENGTH_BYTES, deadline), "little")
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a handshake message of {length} bytes")
        try:
            return self._decoder.decode(self._read(length, deadline))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"undecodable handshake message: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            if deadline is not None and not self.poll(deadline - time.monotonic()):
                raise TimeoutError("no handshake message in time")
            try:
                part = self._socket.recv(size - len(parts))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError("the other end of the channel is gone")
            parts += part
        return bytes(parts)
