"""The two threads that connect a core process with its clients. `EngineCoreProc` starts them; nothing else touches
their sockets.
"""

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..protocol.codec import Buffer, MsgpackDecoder, MsgpackEncoder
from ..protocol.errors import ProtocolError, text_of
from ..protocol.outputs import (
    ENGINE_CORE_DEAD,
    CurveKeys,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    UtilityOutput,
)
from ..protocol.requests import EngineCoreRequest, EngineCoreRequestType, UtilityRequest
from ..protocol.resolved_sampling import ResolvedSampling
from ..protocol.sockets import OutputSeal, connect, receive_frames
from .engine_core import Abort
from .scheduler.request import Request

logger = logging.getLogger("corespan.core")

F = TypeVar("F")
InputQueue = queue.SimpleQueue[tuple[EngineCoreRequestType, object]]
ZmqSocket = zmq.Socket[bytes]
ZmqContext = zmq.Context[ZmqSocket]


class ClientGone(NamedTuple):
    """In place of request ids: all requests of this client are to be aborted."""

    client_index: int


class RequestIntake(Protocol):
    """What the input thread needs of the core."""

    input_queue: InputQueue
    abort_queue: queue.SimpleQueue[Abort]

    def preprocess_add_request(self, request: EngineCoreRequest) -> Request: ...

    def fail_request(self, request: EngineCoreRequest, error: BaseException) -> None: ...

    def fail_call(self, client_index: int, call_id: int, error: BaseException) -> None: ...


class InputThread(threading.Thread):
    """Decodes what clients send and prepares requests, while the model runs. Ends when the ZMQ context does.

    Where several clients share the core, it also watches for clients that go away.
    """

    def __init__(
        self,
        context: ZmqContext,
        addresses: Sequence[str],
        identity: bytes,
        ready: bytes,
        intake: RequestIntake,
        on_failure: Callable[[str], None],
        curve_keys: CurveKeys | None,
    ) -> None:
        """`ready` is the first message to every client, and teaches its socket the way to this core."""
        super().__init__(name="core-input", daemon=True)
        self._context = context
        self._addresses = addresses
        self._identity = identity
        self._ready = ready
        self._intake = intake
        self._on_failure = on_failure
        self._curve_keys = curve_keys
        self._monitors: dict[ZmqSocket, tuple[int, ZmqSocket]] = {}  # by monitor, the client's index and socket
        self._gone: set[int] = set()  # clients that were connected and are not
        self._add_decoder = MsgpackDecoder(EngineCoreRequest)
        self._abort_decoder = MsgpackDecoder(list[str])
        self._utility_decoder = MsgpackDecoder(UtilityRequest)

    def run(self) -> None:
        sockets = [
            connect(self._context, zmq.DEALER, address, self._identity, self._curve_keys) for address in self._addresses
        ]
        try:
            self._serve(sockets)
        except zmq.ContextTerminated:
            pass
        except BaseException:
            self._on_failure(f"the input thread failed\n{traceback.format_exc()}")
        finally:
            for socket in [*sockets, *self._monitors]:
                socket.close()

    def _serve(self, sockets: list[ZmqSocket]) -> None:
        poller = zmq.Poller()
        for socket in sockets:
            socket.send(self._ready)
            poller.register(socket, zmq.POLLIN)
        client_index = {socket: index for index, socket in enumerate(sockets)}
        self._watch_connections(sockets, poller)
        while True:
            for socket, _ in poller.poll():
                if socket in self._monitors:
                    self._handle_connection_event(socket, *self._monitors[socket])
                else:
                    self._handle(client_index[socket], receive_frames(socket))

    def _watch_connections(self, sockets: list[ZmqSocket], poller: zmq.Poller) -> None:
        """A lone client is the parent, whose end is noticed elsewhere."""
        for client_index, socket in enumerate(sockets if len(sockets) > 1 else ()):
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            poller.register(monitor, zmq.POLLIN)
            self._monitors[monitor] = (client_index, socket)

    def _handle_connection_event(self, monitor: ZmqSocket, client_index: int, socket: ZmqSocket) -> None:
        """A client's requests end with it. Whoever takes its place is told that the core is ready."""
        if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
            self._gone.add(client_index)
            self._intake.input_queue.put((EngineCoreRequestType.ABORT, ClientGone(client_index)))
        elif client_index in self._gone:
            self._gone.remove(client_index)
            socket.send(self._ready)

    def _handle(self, client_index: int, frames: list[Buffer]) -> None:
        try:
            request_type = EngineCoreRequestType(bytes(frames[0]))
            if request_type is EngineCoreRequestType.ADD:
                self._add(client_index, frames[1:])
            elif request_type is EngineCoreRequestType.ABORT:
                self._abort(Abort(client_index, self._abort_decoder.decode(frames[1:])))
            elif request_type is EngineCoreRequestType.UTILITY:
                self._call(client_index, frames[1:])
            else:
                logger.error("Dropped a message of type %s from client %d", request_type.name, client_index)
        except (ProtocolError, ValueError) as error:
            logger.error("Dropped a message from client %d: %s", client_index, error)

    def _add(self, client_index: int, frames: list[Buffer]) -> None:
        try:
            request = self._add_decoder.decode(frames)
        except ProtocolError as error:
            request_id = _readable_field(frames, 0, str)
            unreadable = EngineCoreRequest(request_id, [], ResolvedSampling(), client_index=client_index)
            self._intake.fail_request(unreadable, error)
            return
        request.client_index = client_index
        try:
            prepared = self._intake.preprocess_add_request(request)
        except BaseException as error:  # whatever is wrong with a request ends that request alone
            self._intake.fail_request(request, error)
            return
        self._intake.input_queue.put((EngineCoreRequestType.ADD, prepared))

    def _call(self, client_index: int, frames: list[Buffer]) -> None:
        try:
            call = self._utility_decoder.decode(frames)
        except ProtocolError as error:
            self._intake.fail_call(client_index, _readable_field(frames, 1, int), error)
            return
        call.client_index = client_index
        self._intake.input_queue.put((EngineCoreRequestType.UTILITY, call))

    def _abort(self, abort: Abort) -> None:
        """Queued twice: `abort_queue` takes effect before the output of the step that runs is looked at; `input_queue`
        catches a request that was still in that queue then, and empties `abort_queue` before a later one is added.
        """
        self._intake.abort_queue.put(abort)
        self._intake.input_queue.put((EngineCoreRequestType.ABORT, abort))


def _readable_field(frames: list[Buffer], index: int, field_type: type[F]) -> F:
    """One field of a message that as a whole is not to be understood: whom to tell. Raises ProtocolError without it."""
    try:
        field = msgspec.msgpack.decode(frames[0], type=list)[index]
    except (IndexError, RecursionError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from error
    if not isinstance(field, field_type):
        raise ProtocolError(f"a message whose field {index} is no {field_type.__name__}")
    return field


class DeadSentinel(NamedTuple):
    """Tells every client, after all outputs before it, that the core is about to exit."""

    cause: str


OutputQueue = queue.SimpleQueue[tuple[int, EngineCoreOutputs] | DeadSentinel | None]


class OutputThread(threading.Thread):
    """Encodes and sends outputs, each to its client, while the next step runs. None in the queue ends it."""

    def __init__(
        self,
        context: ZmqContext,
        addresses: Sequence[str],
        engine_index: int,
        output_token: bytes,
        output_queue: OutputQueue,
        input_queue: InputQueue,
        on_failure: Callable[[str], None],
        curve_keys: CurveKeys | None,
    ) -> None:
        """`input_queue` is told to abort a request whose output cannot be sent."""
        super().__init__(name="core-output", daemon=True)
        self._context = context
        self._addresses = addresses
        self._seals = [OutputSeal(output_token) for _ in addresses]
        self._engine_index = engine_index
        self._queue = output_queue
        self._input_queue = input_queue
        self._on_failure = on_failure
        self._curve_keys = curve_keys
        self._encoder = MsgpackEncoder()

    def run(self) -> None:
        sockets = [connect(self._context, zmq.PUSH, address, keys=self._curve_keys) for address in self._addresses]
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, DeadSentinel):
                    for socket, seal in zip(sockets, self._seals, strict=True):
                        socket.send_multipart([seal.next(), ENGINE_CORE_DEAD, item.cause.encode(errors="replace")])
                else:
                    client_index, outputs = item
                    frames = self._encode(client_index, outputs)
                    sockets[client_index].send_multipart([self._seals[client_index].next(), *frames], copy=False)
        except BaseException:
            self._on_failure(f"the output thread failed\n{traceback.format_exc()}")
        finally:
            for socket in sockets:
                socket.close()

    def _encode(self, client_index: int, outputs: EngineCoreOutputs) -> list[Buffer]:
        outputs.engine_index = self._engine_index
        if not outputs.timestamp:
            outputs.timestamp = time.monotonic()
        try:
            return self._encoder.encode(outputs)
        except BaseException as error:
            answer = outputs.utility_output
            if answer is not None:
                outputs.utility_output = failed_call(answer.call_id, error)
            outputs.outputs = [self._sendable(client_index, output) for output in outputs.outputs]
            return self._encoder.encode(outputs)

    def _sendable(self, client_index: int, output: EngineCoreOutput) -> EngineCoreOutput:
        """The output or, if it cannot be sent, its request's end. Log-probabilities can be longer than a frame may."""
        try:
            self._encoder.encode(output)
        except BaseException as error:
            self._input_queue.put((EngineCoreRequestType.ABORT, Abort(client_index, [output.request_id])))
            return EngineCoreOutput(
                output.request_id,
                [],
                finish_reason=FinishReason.ERROR,
                stop_reason=text_of(error),
                trace_headers=output.trace_headers,
                handle=output.handle,
            )
        return output


def failed_call(call_id: int, error: BaseException) -> UtilityOutput:
    failure_type = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return UtilityOutput(call_id, failure_message=text_of(error), failure_type=failure_type)
