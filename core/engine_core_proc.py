"""The engine core in a process of its own: an input thread, the busy loop, an output thread.

`process_main` builds and runs it; clients speak to it over ZMQ. What arrives and cannot be used is logged and dropped,
or ends the one request it was about; only a failure of the step or of a thread ends the core.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import queue
import time
import traceback
from concurrent.futures import Future
from typing import BinaryIO, cast

import msgspec
import zmq

from ..protocol.config import VllmConfig
from ..protocol.outputs import EngineCoreOutputs, FinishReason, HandshakeInit, HandshakeReady, UtilityOutput
from ..protocol.requests import REQUEST_SHUTDOWN, EngineCoreRequestType, UtilityRequest
from ..protocol.sockets import OUTPUT_LINGER_MS, identity
from .core_io import ClientGone, DeadSentinel, InputQueue, InputThread, OutputQueue, OutputThread, failed_call
from .engine_core import Abort, DuplicateRequestError, EngineCore
from .scheduler.request import Request

logger = logging.getLogger("corespan.core")

NOTHING_SCHEDULED_WAIT = 0.001  # seconds; requests wait for something outside the scheduler, such as a grammar


class EngineCoreProc(EngineCore):
    """Whatever the clients ask for passes through `input_queue`; whatever they get passes through `output_queue`."""

    def __init__(self, init: HandshakeInit, stacks: BinaryIO) -> None:
        """Returns with the model loaded and both threads running. `stacks` takes the stacks of a step that hangs."""
        self.input_queue: InputQueue = queue.SimpleQueue()
        self.output_queue: OutputQueue = queue.SimpleQueue()
        self._stacks = stacks
        self._shutdown_deadline: float | None = None
        self._thread_failure: str | None = None
        config = msgspec.msgpack.decode(init.config, type=VllmConfig)
        super().__init__(config, init.executor_class, init.log_stats, emit=self._send)
        gc.collect()
        gc.freeze()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._output_thread = OutputThread(
            self._context,
            init.output_addresses,
            init.engine_index,
            init.output_token,
            self.output_queue,
            self.input_queue,
            self._on_thread_failure,
            init.curve_keys,
        )
        self._input_thread = InputThread(
            self._context,
            init.input_addresses,
            identity(init.engine_index, init.output_token),
            msgspec.msgpack.encode(self.ready_message()),
            self,
            self._on_thread_failure,
            init.curve_keys,
        )
        self._output_thread.start()
        self._input_thread.start()

    def ready_message(self) -> HandshakeReady:
        return HandshakeReady(
            pid=os.getpid(),
            max_model_len=self.vllm_config.model_config.max_model_len,
            num_gpu_blocks=self._num_gpu_blocks,
            block_size=self.vllm_config.cache_config.block_size,
            dtype=self.vllm_config.model_config.dtype,
        )

    def request_shutdown(self, drain_timeout: float) -> None:
        """Leave once everything in flight is done, or after `drain_timeout` seconds. Callable from any thread.

        Asked again, it leaves no later than it would have: a signal that is sent twice does not begin the drain anew.
        """
        deadline = time.monotonic() + drain_timeout
        self._shutdown_deadline = min(deadline, self._shutdown_deadline or deadline)
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    def run(self) -> BaseException | None:
        """Serves until shut down. Returns what went wrong, after the clients have been told, or None."""
        error: BaseException | None = None
        cause = "it was told to leave"
        try:
            self._run_busy_loop()
        except BaseException as failure:  # SystemExit too: whoever raised it, the clients are to know
            error = failure
            logger.critical("The engine core failed and leaves", exc_info=error)
            cause = "".join(traceback.format_exception(error))
        self.output_queue.put(DeadSentinel(cause))
        self._close()
        return error

    def _close(self) -> None:
        self.output_queue.put(None)
        self._output_thread.join(OUTPUT_LINGER_MS / 1000)
        self._context.term()
        self.shutdown()

    def _on_thread_failure(self, description: str) -> None:
        self._thread_failure = description
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    # The busy loop

    def _run_busy_loop(self) -> None:
        while self._serving():
            if self.has_work():
                self._process_engine_step()
            else:
                self.run_idle_actions()
                self._handle(*self.input_queue.get())
            self._drain_input_queue()

    def _serving(self) -> bool:
        if self._thread_failure is not None:
            raise RuntimeError(self._thread_failure)
        if self._shutdown_deadline is None:
            return True
        if self.has_work() and time.monotonic() < self._shutdown_deadline:
            return True
        self.abort_all_requests()
        return False

    def _process_engine_step(self) -> None:
        outputs_by_client, executed = self._watched_step()
        for client_index, outputs in outputs_by_client.items():
            self._send(client_index, outputs)
        if not executed and self.has_work():
            with contextlib.suppress(queue.Empty):
                self._handle(*self.input_queue.get(timeout=NOTHING_SCHEDULED_WAIT))

    def _watched_step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Ends the process, every thread's stack written down, when a step takes longer than `step_timeout`.

        Works while native code hangs and holds the interpreter's lock.
        """
        step_timeout = self.vllm_config.parallel_config.step_timeout
        if step_timeout is None:
            return self.step()
        faulthandler.dump_traceback_later(step_timeout, exit=True, file=self._stacks)
        try:
            return self.step()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _drain_input_queue(self) -> None:
        while not self.input_queue.empty():
            self._handle(*self.input_queue.get())

    # What clients ask for

    def _handle(self, request_type: EngineCoreRequestType, message: object) -> None:
        if request_type is EngineCoreRequestType.ADD:
            self._handle_add(cast(Request, message))
        elif request_type is EngineCoreRequestType.ABORT:
            if isinstance(message, ClientGone):
                self.abort_client_requests(message.client_index)
            else:
                abort = cast(Abort, message)
                self.process_abort_queue()
                self.abort_requests(abort.request_ids, abort.client_index)
        elif request_type is EngineCoreRequestType.UTILITY:
            self._handle_utility(cast(UtilityRequest, message))

    def _handle_add(self, request: Request) -> None:
        if self._shutdown_deadline is not None:
            self._emit_finished([request], FinishReason.ABORT)
            return
        try:
            self.add_prepared_request(request)
        except DuplicateRequestError as error:
            # No output: it would end the request in flight that has the same id.
            logger.error("Refused a request: %s", error)

    def _handle_utility(self, call: UtilityRequest) -> None:
        try:
            if call.method == REQUEST_SHUTDOWN and call.client_index == 0:
                self.request_shutdown(*msgspec.convert(call.args, tuple[float]))
                return
            if self._shutdown_deadline is not None:
                raise RuntimeError("the engine core is shutting down")
            result = self.call_utility(call.method, call.args)
        except BaseException as error:
            self._answer(call, failed_call(call.call_id, error))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._answer(call, _answer_of(call.call_id, done)))
        else:
            self._answer(call, UtilityOutput(call.call_id, result=result))

    def fail_call(self, client_index: int, call_id: int, error: BaseException) -> None:
        """Answers a call that could not be read."""
        self._send(client_index, EngineCoreOutputs(utility_output=failed_call(call_id, error)))

    def _answer(self, call: UtilityRequest, answer: UtilityOutput) -> None:
        self._send(call.client_index, EngineCoreOutputs(utility_output=answer))

    def _send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        self.output_queue.put((client_index, outputs))


def _answer_of(call_id: int, done: "Future[object]") -> UtilityOutput:
    error = done.exception()
    return UtilityOutput(call_id, result=done.result()) if error is None else failed_call(call_id, error)
