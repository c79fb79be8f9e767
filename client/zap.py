"""An engine's TCP sockets, and who may connect to them: answers the requests by which ZMQ asks (ZAP, RFC 27)."""

import logging
import threading

import zmq
from zmq.utils import z85

from ..protocol.outputs import CurveKeys
from ..protocol.sockets import bind, make_curve_keys

logger = logging.getLogger("corespan.client")

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def bind_encrypted(context: Context, core_address: str) -> tuple[Socket, Socket, CurveKeys]:
    """A client's sockets for requests and outputs on an address of this machine, and the keys with which the core, and
    nobody else, can connect to them.

    Raises ValueError for an address that is none, and where ZMQ has no encryption.
    """
    if not zmq.has("curve"):
        raise ValueError(f"core_address is {core_address!r}; this build of ZMQ has no encryption, so leave it out")
    own_keys, core_keys = make_curve_keys()
    Authenticator(context, own_keys.peer_key).start()
    try:
        requests = bind(context, zmq.ROUTER, f"{core_address}:*", own_keys)
        return requests, bind(context, zmq.PULL, f"{core_address}:*", own_keys), core_keys
    except OSError as error:
        raise ValueError(
            f"core_address is {core_address!r}; it must be an address of this machine ({error.strerror})"
        ) from error


class Authenticator(threading.Thread):
    """Lets in whoever has proven to hold the secret key to one public key, and nobody else. Ends when the ZMQ context
    does.
    """

    def __init__(self, context: Context, allowed_key: bytes) -> None:
        """`allowed_key` is the text of a public key. Sockets bound from here on are guarded."""
        super().__init__(name="corespan-authenticator", daemon=True)
        self._allowed = z85.decode(allowed_key)
        # Of a shadow, whose sockets the context's owner does not close: ZMQ's sockets are closed where they are used.
        shadow: Context = zmq.Context.shadow(context.underlying)
        self._socket = shadow.socket(zmq.REP)
        self._socket.bind(ZAP_ENDPOINT)

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError:  # the context would wait for the socket for ever
            self._socket.close()
            raise

    def run(self) -> None:
        with self._socket:
            while True:
                try:
                    self._answer(self._socket.recv_multipart())
                except zmq.ContextTerminated:
                    return

    def _answer(self, question: list[bytes]) -> None:
        version, request_id, _, address, _, mechanism, *credentials = question
        admitted = mechanism == b"CURVE" and credentials == [self._allowed]
        if not admitted:
            logger.error("Refused a connection from %s to the engine's sockets", address.decode(errors="replace"))
        status, text = (b"200", b"OK") if admitted else (b"400", b"not the engine core")
        self._socket.send_multipart([version, request_id, status, text, b"", b""])
