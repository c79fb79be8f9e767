"""A client's connection to a core process: the process itself, the sockets, and what to do when either ends.

The sync and the asyncio client each hold a connection and differ only in how they wait for it.
"""

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections import deque
from typing import Protocol

import msgspec
import zmq

from ..protocol.codec import MsgpackDecoder, MsgpackEncoder
from ..protocol.config import VllmConfig, with_final_figures
from ..protocol.errors import EngineDeadError, ProtocolError
from ..protocol.outputs import ENGINE_CORE_DEAD, CurveKeys, EngineCoreOutputs, HandshakeInit, HandshakeReady
from ..protocol.requests import REQUEST_SHUTDOWN, EngineCoreRequest, EngineCoreRequestType, UtilityRequest
from ..protocol.sockets import (
    TOKEN_BYTES,
    OutputSeal,
    bind,
    bound_address,
    identity,
    receive_frames,
)
from ..protocol.user_classes import pickles_for_core, user_main
from .picture_ledger import PictureLedger
from .process import CoreProcess, ForeignProcess, make_socket_dir, require_file_descriptors
from .zap import bind_encrypted

logger = logging.getLogger("corespan.client")

ENGINE_INDEX = 0
LAST_OUTPUTS_WAIT = 0.02  # seconds; what a core had sent when it was killed follows the output before within this time
LEAVING_WAIT = 2.0  # seconds; what a core that leaves in order sends last
SHUT_DOWN = "it was shut down"
READY_WAIT = 10.0  # seconds; a core that says it is ready connects its sockets at the same time


class ClientAddresses(msgspec.Struct, kw_only=True):
    """All that a client needs to connect to a core. `output_token` is a secret between the core and its clients: hand
    it to other processes over pipes, not in arguments or the environment.
    """

    socket_dir: str
    output_token: bytes  # of TOKEN_BYTES
    client_index: int = 0
    core_pid: int = 0

    @property
    def input_address(self) -> str:
        """Where the client binds the socket for requests."""
        return f"ipc://{self.socket_dir}/input-{self.client_index}"

    @property
    def output_address(self) -> str:
        """Where the client binds the socket for outputs."""
        return f"ipc://{self.socket_dir}/output-{self.client_index}"

    def of_client(self, client_index: int) -> "ClientAddresses":
        return msgspec.structs.replace(self, client_index=client_index)


class Connection(Protocol):
    """What a client needs of its core. All may be called in any thread; one at a time receives and waits."""

    released: bool  # the sockets are closed

    @property
    def vllm_config(self) -> VllmConfig: ...

    @property
    def addresses(self) -> ClientAddresses: ...

    @property
    def is_fork(self) -> bool:
        """Whether this is a copy in a forked process, which must leave the core and the sockets alone."""

    @property
    def dead(self) -> bool:
        """Whether the core is gone for good and can be asked nothing any more. Looks, and does not wait."""

    @property
    def drained(self) -> bool:
        """Whether it is dead and there is nothing left to be received."""

    def dead_error(self) -> EngineDeadError: ...

    @property
    def num_held(self) -> int:
        """Requests that no core has yet."""

    def add(self, request: EngineCoreRequest) -> None:
        """Raises EngineDeadError; TypeError, OverflowError or ValueError for what cannot be encoded."""

    def abort(self, request_ids: list[str]) -> None:
        """A dead core is ignored."""

    def call(self, call: UtilityRequest) -> None:
        """The answer is received like any output. Raises what `add` raises."""

    def receive_nowait(self) -> EngineCoreOutputs | None:
        """The next message that is here, or None. Looks whether the core has died, too."""

    def wait(self) -> None:
        """Returns when `receive_nowait` has something to do, or the connection is drained."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What becomes readable when `receive_nowait` has something to do; to be asked again after each call of it.
        They may announce a message once, so take all that is there.
        """

    @property
    def look_again_in(self) -> float | None:
        """After so many seconds `receive_nowait` has something to do even if no descriptor says so."""

    def stop(self, drain_timeout: float) -> None:
        """Ends the core. What it sent meanwhile can still be received. Repeated calls do nothing."""

    def release(self) -> None:
        """Closes the sockets and removes their folder, once no thread is using them. Repeated calls do nothing."""

    def close(self, drain_timeout: float = 0.0) -> None:
        """`stop`, then `release`."""


class CoreConnection:
    """A `Connection` to one core.

    Nothing here refers to the client, so that a client that is dropped can be collected; `close` then cleans up.
    """

    num_held = 0

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
        self.was_killed = False  # by SIGKILL, not by us
        self.released = False
        self._cause: str | None = None  # of the core's death
        self._closing = False
        self._silent = False  # nothing more comes over the socket
        self._silent_at: float | None = None  # when that is so, unless something comes; known once the core has died
        self._received: deque[EngineCoreOutputs] = deque()  # before the sockets were closed
        self._death_lock = threading.Lock()
        self._close_lock = threading.RLock()
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._encoder = MsgpackEncoder()
        mm_config = vllm_config.mm_config
        self._pictures = None if mm_config is None else PictureLedger(mm_config.cache_bytes)
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        core_address = vllm_config.parallel_config.core_address
        if core_address is not None and (client_count > 1 or client_addresses is not None):
            raise ValueError(f"core_address is {core_address!r}; a core with several clients has unix sockets only")
        pickled_classes = pickles_for_core(vllm_config.model_config.logits_processors)
        require_file_descriptors()
        self.addresses = client_addresses or ClientAddresses(
            socket_dir=make_socket_dir(), output_token=secrets.token_bytes(TOKEN_BYTES)
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._is_owner = client_addresses is None
        self._core_identity = identity(ENGINE_INDEX, self.addresses.output_token)
        self._seal = OutputSeal(self.addresses.output_token)
        try:
            core_keys = self._bind(core_address)
            self.process: CoreProcess | ForeignProcess
            if self._is_owner:
                clients = [self.addresses.of_client(index) for index in range(1, client_count)]
                init = HandshakeInit(
                    config=msgspec.msgpack.encode(vllm_config),
                    engine_index=ENGINE_INDEX,
                    socket_dir=self.addresses.socket_dir,
                    output_token=self.addresses.output_token,
                    input_addresses=[bound_address(self._input), *(other.input_address for other in clients)],
                    output_addresses=[bound_address(self._output), *(other.output_address for other in clients)],
                    executor_class=executor_class,
                    log_stats=log_stats,
                    curve_keys=core_keys,
                    user_main=user_main(),
                    pickled_classes=pickled_classes,
                )
                self.process = CoreProcess(init)
            else:
                self.process = ForeignProcess(self.addresses.core_pid)
        except BaseException:
            self._release_sockets()
            raise
        self._output_fd = int(self._output.getsockopt(zmq.FD))
        self._poller = zmq.Poller()
        self._poller.register(self._output, zmq.POLLIN)
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
            self._output = bind(self._context, zmq.PULL, self.addresses.output_address)
            return None
        self._input, self._output, core_keys = bind_encrypted(self._context, core_address)
        return core_keys

    def _await_route(self, vllm_config: VllmConfig) -> VllmConfig:
        """The socket can send to the core once the core has said on it that it is ready, and with which figures."""
        deadline = time.monotonic() + READY_WAIT
        while self._input.poll(_milliseconds(deadline - time.monotonic())):
            sender, *frames = self._input.recv_multipart()
            if sender == self._core_identity:
                ready = msgspec.msgpack.decode(frames[0], type=HandshakeReady)
                self.addresses.core_pid = ready.pid
                return with_final_figures(vllm_config, ready.max_model_len, ready.num_gpu_blocks, ready.block_size)
        raise TimeoutError("the engine core lives but did not connect to its request socket")

    @property
    def is_fork(self) -> bool:
        return os.getpid() != self.process.owner_pid

    # Sending

    def add(self, request: EngineCoreRequest) -> None:
        if self._pictures is not None:
            request = self._pictures.trim(request)
        self._send(EngineCoreRequestType.ADD, request)

    def abort(self, request_ids: list[str]) -> None:
        if self._pictures is not None:
            self._pictures.discard(request_ids)
        with contextlib.suppress(EngineDeadError):  # then nothing is left to be aborted
            self._send(EngineCoreRequestType.ABORT, request_ids)

    def call(self, call: UtilityRequest) -> None:
        self._send(EngineCoreRequestType.UTILITY, call)

    def _send(self, request_type: EngineCoreRequestType, message: object) -> None:
        with self._send_lock:
            if self.dead:
                raise self.dead_error()
            frames = self._encoder.encode(message)
            try:
                self._input.send_multipart([self._core_identity, request_type.value, *frames])
            except zmq.ZMQError as error:
                self._on_death()
                raise self.dead_error() from error

    # Receiving

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The core's process is watched for its end until that has been noticed."""
        if self.released or self._silent:
            return ()
        ends = () if self._silent_at is not None else (self.process.channel.fileno(),)
        return (self._output_fd, *ends)

    @property
    def look_again_in(self) -> float | None:
        if self._silent or self._silent_at is None:
            return None
        return max(self._silent_at - time.monotonic(), 0.0)

    def receive_nowait(self) -> EngineCoreOutputs | None:
        """What is not to be understood is logged and dropped."""
        with self._receive_lock:
            return self._received.popleft() if self._received else self._read()

    def wait(self) -> None:
        with self._receive_lock:
            while not (self._received or self._silent):
                if self._silent_at is None:
                    if self._output in dict(self._poller.poll()):
                        return
                elif self._output.poll(_milliseconds(self._silent_at - time.monotonic())):
                    return
                self._look_for_end()

    def _read(self) -> EngineCoreOutputs | None:
        while not self._silent:
            try:
                frames = receive_frames(self._output, zmq.NOBLOCK)
            except zmq.Again:
                self._look_for_end()
                return None
            self._silent_at = None
            try:
                frames = self._seal.check(frames)
                if frames[0] != ENGINE_CORE_DEAD:
                    return self._without_misses(self._decoder.decode(frames))
            except ProtocolError as error:
                logger.error("Dropped a message on the output socket: %s", error)
            else:
                self._silent = True
                self._on_death(b"".join(frames[1:]).decode(errors="replace"))
        return None

    def _without_misses(self, received: EngineCoreOutputs) -> EngineCoreOutputs:
        """Sends requests again, whole, that left out pictures which the core turns out to lack."""
        if self._pictures is None:
            return received
        for output in received.outputs:
            request = self._pictures.answered(output)
            if request is not None:
                with contextlib.suppress(EngineDeadError):
                    self._send(EngineCoreRequestType.ADD, request)
        received.outputs = [output for output in received.outputs if not output.resend]
        return received

    def _look_for_end(self) -> None:
        """With nothing to be read: what the core sent last may still be on its way when its process has ended."""
        if self._silent_at is None:
            if self.process.poll_death():
                wait = LEAVING_WAIT if self.process.is_leaving() else LAST_OUTPUTS_WAIT
                self._silent_at = time.monotonic() + wait
        elif time.monotonic() >= self._silent_at:
            self._silent = True
            self._on_death()

    # Death

    @property
    def dead(self) -> bool:
        if self._cause is None and self.process.poll_death():
            self._on_death()
        return self._cause is not None

    @property
    def drained(self) -> bool:
        return self._silent and not self._received

    def dead_error(self) -> EngineDeadError:
        return EngineDeadError(self._cause)

    def _on_death(self, cause: str | None = None) -> None:
        with self._death_lock:
            if self._cause is not None:
                return
            if self._closing:
                self._cause = SHUT_DOWN
                return
            self.was_killed = cause is None and self.process.was_killed()
            self._cause = cause or self.process.cause_of_death()
            self.process.kill()
            self._remove_socket_dir()
        logger.error("The engine core has died: %s", self._cause)

    # The end

    def close(self, drain_timeout: float = 0.0) -> None:
        self.stop(drain_timeout)
        self.release()

    def stop(self, drain_timeout: float) -> None:
        with self._close_lock:
            if self._closing or self.is_fork:
                return
            self._closing = True
            with contextlib.suppress(EngineDeadError):
                if self._is_owner:
                    self.call(UtilityRequest(0, 0, REQUEST_SHUTDOWN, [drain_timeout]))
                self.process.wait_for_exit(drain_timeout)
            self.process.kill()
            self._read_to_the_end()
            self._on_death()

    def _read_to_the_end(self) -> None:
        with self._receive_lock:
            wait = LEAVING_WAIT if self.process.is_leaving() else LAST_OUTPUTS_WAIT
            while not self._silent:
                outputs = self._read()
                if outputs is not None:
                    self._received.append(outputs)
                elif not self._silent and not self._output.poll(_milliseconds(wait)):
                    self._silent = True

    def release(self) -> None:
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


def _milliseconds(seconds: float) -> int:
    """For a poll, which with too few would return before the time is over."""
    return max(int(seconds * 1000) + 1, 0)
