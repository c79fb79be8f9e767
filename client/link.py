"""A client's connection to a core process: the process itself, the sockets, and what to do when either ends.

The sync and the asyncio client each hold a link and differ only in how they wait for it.
"""

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time

import msgspec
import zmq

from ..protocol.codec import MsgpackDecoder, MsgpackEncoder
from ..protocol.config import VllmConfig
from ..protocol.errors import EngineDeadError, ProtocolError
from ..protocol.outputs import ENGINE_CORE_DEAD, CurveKeys, EngineCoreOutputs, HandshakeInit, HandshakeReady
from ..protocol.requests import REQUEST_SHUTDOWN, EngineCoreRequestType, UtilityRequest
from ..protocol.sockets import (
    TOKEN_BYTES,
    OutputSeal,
    bind,
    bound_address,
    identity,
    make_curve_keys,
    receive_frames,
)
from ..protocol.user_classes import pickles_for_core, user_main
from .addresses import ENGINE_INDEX, ClientAddresses
from .attached import AttachedCore
from .doorkeeper import Doorkeeper
from .launcher import CoreProcess, make_socket_dir

logger = logging.getLogger("corespan.client")

LAST_OUTPUTS_WAIT_MS = 20  # what a core had sent when it was killed arrives within this time of the output before
GOODBYE_WAIT_MS = 2000  # what a core that leaves in order says last
SHUT_DOWN = "it was shut down"
NUM_FILE_DESCRIPTORS = 48  # more than a link and the start of its core take
READY_WAIT = 10.0  # seconds; a core that says it is ready connects its sockets at the same time


class CoreLink:
    """Sends and receives in any thread, one at a time. `dead_cause` is None while the core lives.

    Nothing here refers to the client, so that a client that is dropped can be collected; `close` then cleans up.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: str,
        log_stats: bool,
        client_count: int = 1,
        client_addresses: ClientAddresses | None = None,
    ) -> None:
        """Starts a core for `client_count` clients and connects as the first of them; with `client_addresses`, connects
        as another client of a core that runs.

        Raises what `CoreProcess` raises, OSError where there is no room for sockets, ValueError for a `core_address`
        that is none of this machine or is to serve several clients, or for a class that a core cannot find.
        """
        self.dead_cause: str | None = None
        self.was_killed = False  # by SIGKILL, not by us
        self.released = False  # the sockets are closed
        self._closing = False
        self._close_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        core_address = vllm_config.parallel_config.core_address
        if core_address is not None and (client_count > 1 or client_addresses is not None):
            raise ValueError(f"core_address is {core_address!r}; a core with several clients has unix sockets only")
        pickled_classes = pickles_for_core(vllm_config.model_config.logits_processors)
        _require_file_descriptors()
        self.addresses = client_addresses or ClientAddresses(
            socket_dir=make_socket_dir(), output_token=secrets.token_bytes(TOKEN_BYTES)
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._is_owner = client_addresses is None
        self._core_identity = identity(ENGINE_INDEX, self.addresses.output_token)
        self._seal = OutputSeal(self.addresses.output_token)
        try:
            core_keys = self._bind(core_address)
            self.process: CoreProcess | AttachedCore
            if self._is_owner:
                clients = [self.addresses.of_client(index) for index in range(1, client_count)]
                init = HandshakeInit(
                    config=msgspec.msgpack.encode(vllm_config),
                    engine_index=ENGINE_INDEX,
                    socket_dir=self.addresses.socket_dir,
                    output_token=self.addresses.output_token,
                    input_addresses=[bound_address(self._input), *(other.input_address for other in clients)],
                    output_addresses=[bound_address(self.output_socket), *(other.output_address for other in clients)],
                    executor_class=executor_class,
                    log_stats=log_stats,
                    curve_keys=core_keys,
                    user_main=user_main(),
                    pickled_classes=pickled_classes,
                )
                self.process = CoreProcess(init)
            else:
                self.process = AttachedCore(self.addresses.core_pid)
        except BaseException:
            self._release_sockets()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self.output_socket, zmq.POLLIN)
        self._poller.register(self.process.channel.fileno(), zmq.POLLIN)
        try:
            self.vllm_config = self._await_route(vllm_config)
        except BaseException:
            self.close()
            raise

    def _bind(self, core_address: str | None) -> CurveKeys | None:
        """Makes both sockets; over TCP also keys, of which the core's are returned."""
        if core_address is None:
            self._input = bind(self._context, zmq.ROUTER, self.addresses.input_address)
            self.output_socket = bind(self._context, zmq.PULL, self.addresses.output_address)
            return None
        if not zmq.has("curve"):
            raise ValueError(f"core_address is {core_address!r}; this build of ZMQ has no encryption, so leave it out")
        own_keys, core_keys = make_curve_keys()
        Doorkeeper(self._context, own_keys.peer_key).start()
        try:
            self._input = bind(self._context, zmq.ROUTER, f"{core_address}:*", own_keys)
            self.output_socket = bind(self._context, zmq.PULL, f"{core_address}:*", own_keys)
        except OSError as error:
            raise ValueError(
                f"core_address is {core_address!r}; it must be an address of this machine ({error.strerror})"
            ) from error
        return core_keys

    def _await_route(self, vllm_config: VllmConfig) -> VllmConfig:
        """The socket can send to the core once the core has said on it that it is ready, and with which figures."""
        deadline = time.monotonic() + READY_WAIT
        while self._input.poll(int(max(deadline - time.monotonic(), 0.0) * 1000)):
            sender, *frames = self._input.recv_multipart()
            if sender == self._core_identity:
                ready = msgspec.msgpack.decode(frames[0], type=HandshakeReady)
                self.addresses.core_pid = ready.pid
                return _with_final_figures(vllm_config, ready)
        raise TimeoutError("the engine core lives but did not connect to its request socket")

    def send(self, request_type: EngineCoreRequestType, message: object) -> None:
        """Raises EngineDeadError; TypeError, OverflowError or ValueError for what cannot be encoded."""
        with self._send_lock:
            self.ensure_alive()
            frames = self._encoder.encode(message)
            try:
                self._input.send_multipart([self._core_identity, request_type.value, *frames])
            except zmq.ZMQError as error:
                self.mark_dead()
                raise self.dead_error() from error

    @property
    def output_fd(self) -> int:
        """Becomes readable when a message comes; announces it once, so take all that is there."""
        return int(self.output_socket.getsockopt(zmq.FD))

    @property
    def is_fork(self) -> bool:
        """Whether this is a copy in a forked process, which must leave the core and the sockets alone."""
        return os.getpid() != self.process.owner_pid

    def receive_nowait(self) -> EngineCoreOutputs | None:
        """The next outputs that are here, or None. Marks the core dead when it says so. What is not to be understood is
        logged and dropped.
        """
        with self._receive_lock:
            while self.dead_cause is None:
                try:
                    frames = receive_frames(self.output_socket, zmq.NOBLOCK)
                except zmq.Again:
                    return None
                try:
                    frames = self._seal.check(frames)
                    if frames[0] == ENGINE_CORE_DEAD:
                        self.mark_dead(b"".join(frames[1:]).decode(errors="replace"))
                        return None
                    return self._decoder.decode(frames)
                except ProtocolError as error:
                    logger.error("Dropped a message on the output socket: %s", error)
        return None

    def wait(self) -> None:
        """Returns when there is something to receive, or the core is dead and everything it sent has been received."""
        with self._receive_lock:
            if self.dead_cause is not None:
                return
            while self.output_socket not in dict(self._poller.poll()):
                if self.process.poll_death():
                    if not self.output_socket.poll(self.last_outputs_wait_ms()):
                        self.mark_dead()
                    return

    def last_outputs_wait_ms(self) -> int:
        """How long, after the core's end, what it sent last may take to get here."""
        return GOODBYE_WAIT_MS if self.process.said_goodbye() else LAST_OUTPUTS_WAIT_MS

    def check_death(self) -> bool:
        """Whether the core is dead; looks, and does not wait."""
        if self.dead_cause is None and self.process.poll_death():
            self.mark_dead()
        return self.dead_cause is not None

    def ensure_alive(self) -> None:
        if self.check_death():
            raise self.dead_error()

    def mark_dead(self, cause: str | None = None) -> None:
        if self.dead_cause is not None:
            return
        if self._closing:
            self.dead_cause = SHUT_DOWN
        else:
            self.was_killed = cause is None and self.process.was_killed()
            self.dead_cause = cause or self.process.cause_of_death()
            self.process.kill()
            self._remove_socket_dir()
            logger.error("The engine core has died: %s", self.dead_cause)

    def dead_error(self) -> EngineDeadError:
        return EngineDeadError(self.dead_cause)

    def close(self, drain_timeout: float = 0.0) -> list[EngineCoreOutputs]:
        """`stop`, then `release`. Repeated calls do nothing, nor does one in a fork of the owner."""
        last_outputs = self.stop(drain_timeout)
        self.release()
        return last_outputs

    def stop(self, drain_timeout: float) -> list[EngineCoreOutputs]:
        """Ends the core. Returns what it sent meanwhile and nobody took."""
        with self._close_lock:
            if self._closing or self.is_fork:
                return []
            self._closing = True
        with contextlib.suppress(EngineDeadError):
            if self._is_owner:
                leave = UtilityRequest(0, 0, REQUEST_SHUTDOWN, [drain_timeout])
                self.send(EngineCoreRequestType.UTILITY, leave)
            self.process.wait_for_exit(drain_timeout)
        self.process.kill()
        last_outputs = self._receive_last()
        self.mark_dead()
        return last_outputs

    def _receive_last(self) -> list[EngineCoreOutputs]:
        received = []
        wait_ms = self.last_outputs_wait_ms()
        while self.dead_cause is None:
            outputs = self.receive_nowait()
            if outputs is not None:
                received.append(outputs)
            elif self.dead_cause is None and not self._poll_outputs(wait_ms):
                break
        return received

    def _poll_outputs(self, wait_ms: int) -> int:
        with self._receive_lock:  # a ZMQ socket is one thread's at a time
            return self.output_socket.poll(wait_ms)

    def release(self) -> None:
        """Closes the sockets and removes their folder, once no thread is using them. Repeated calls do nothing."""
        if self.is_fork or self.released:
            return
        with self._receive_lock, self._send_lock:
            self.released = True
            self._release_sockets()
            self.process.channel.close()

    def _release_sockets(self) -> None:
        self._context.destroy(linger=0)
        self._remove_socket_dir()

    def _remove_socket_dir(self) -> None:
        if self._is_owner:
            shutil.rmtree(self.addresses.socket_dir, ignore_errors=True)


def _require_file_descriptors() -> None:
    """Raises OSError (EMFILE) when a link could run out of them half-way, where ZMQ would abort the whole process."""
    taken: list[int] = []
    try:
        for _ in range(NUM_FILE_DESCRIPTORS):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _with_final_figures(vllm_config: VllmConfig, ready: HandshakeReady) -> VllmConfig:
    replace = msgspec.structs.replace
    return replace(
        vllm_config,
        model_config=replace(vllm_config.model_config, max_model_len=ready.max_model_len),
        scheduler_config=replace(vllm_config.scheduler_config, max_model_len=ready.max_model_len),
        cache_config=replace(
            vllm_config.cache_config, num_gpu_blocks=ready.num_gpu_blocks, block_size=ready.block_size
        ),
    )
