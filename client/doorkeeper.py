"""Who may connect to an engine's TCP sockets: answers the requests by which ZMQ asks (ZAP, RFC 27)."""

import logging
import threading

import zmq
from zmq.utils import z85

logger = logging.getLogger("corespan.client")

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class Doorkeeper(threading.Thread):
    """Lets in whoever has proven to hold the secret key to one public key, and nobody else. Ends when the ZMQ context
    does.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allowed_key: bytes) -> None:
        """`allowed_key` is the text of a public key. Sockets bound from here on are guarded."""
        super().__init__(name="corespan-doorkeeper", daemon=True)
        self._allowed = z85.decode(allowed_key)
        # Of a shadow, whose sockets the context's owner does not close: ZMQ's sockets are closed where they are used.
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
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
