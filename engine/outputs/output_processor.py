"""Turns `EngineCoreOutput`s into `RequestOutput`s: text, stop strings, log-probabilities, statistics.

Owned by an engine, which feeds it every batch of outputs from the core. It owns all that the shell knows about a
running request.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...protocol.errors import errors_of, may_be_ctrl_c, raised_in
from ...protocol.outputs import EngineCoreOutput, FinishReason
from ...protocol.param_checks import reject_type
from ...protocol.pooling import PoolingParams
from ...protocol.requests import EngineCoreRequest
from ..metrics.stats import IterationStats, RequestStateStats
from ..requests.parallel_sampling import fan_out
from ..requests.prepared_request import PreparedRequest
from ..text.tokenizer import Tokenizer
from .logprobs import TokenDecoder
from .output_collector import EngineOutput, RequestOutputCollector
from .parent_request import ParentRequest
from .pooling_output import PoolingRequestOutput
from .pooling_state import PoolingState
from .request_output import CompletionOutput
from .request_state import RequestState
from .tracing import RequestTracer

T = TypeVar("T")


@dataclass(slots=True)
class OutputProcessorOutput:
    """`request_outputs`: those of requests without a collector. `reqs_to_abort`: internal ids the core is to stop."""

    request_outputs: list[EngineOutput] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """Every running request's state, by internal id. All tables are empty when nothing runs."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        log_stats: bool,
        stream_interval: int = 1,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tracer = tracer
        self.log_stats = log_stats or tracer is not None
        self.stream_interval = stream_interval
        self.request_states: dict[str, RequestState | PoolingState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self.external_req_ids: dict[str, set[str]] = {}  # the caller's id -> internal ids, children's for n > 1
        self._by_handle: dict[int, RequestState] = {}  # those that generate
        self._handles = itertools.count(1)
        self._decoder = TokenDecoder(tokenizer) if tokenizer is not None else None

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def add_request(
        self, prepared: PreparedRequest, queue: RequestOutputCollector | None = None
    ) -> list[EngineCoreRequest]:
        """Expect outputs for a request, or for each of its n children; what to send to the core for it, each
        with its handle.

        Raises ValueError, and expects nothing, where one with the same internal id is running.
        """
        requests = fan_out(prepared.request, prepared.n)
        for used_id in (prepared.request_id, *(request.request_id for request in requests)):
            if used_id in self.request_states or used_id in self.parent_requests:
                raise ValueError(f"a request with the id {used_id!r} is running already")
        parent = ParentRequest(prepared) if len(requests) > 1 else None
        with errors_of("the tokenizer's decode"):
            states = [self._new_state(prepared, each, parent, index, queue) for index, each in enumerate(requests)]
        for request, state in zip(requests, states, strict=True):
            request.handle = next(self._handles)
            self.request_states[state.request_id] = state
            if isinstance(state, RequestState):
                self._by_handle[request.handle] = state
            self.external_req_ids.setdefault(state.external_req_id, set()).add(state.request_id)
            if parent is not None:
                self.parent_requests[parent.request_id] = parent
                parent.child_ids.add(state.request_id)
        return requests

    def extend_session(self, piece: EngineCoreRequest, prompt_text: str | None = None) -> bool:
        """More prompt for the request with the piece's internal id, whose `resumable` left it open.

        A piece that is not resumable closes it. False where the request has ended: the piece is not to be sent.
        """
        state = self.request_states.get(piece.request_id)
        if not isinstance(state, RequestState) or not state.session_open:
            return False
        piece.handle = state.request.handle
        state.add_piece(piece, prompt_text)
        if not piece.resumable and state.ending is not None:
            self._emit(state, *state.ending, None)
        return True

    def process_outputs(
        self,
        engine_core_outputs: Iterable[EngineCoreOutput],
        engine_core_timestamp: float = 0.0,
        iteration_stats: IterationStats | None = None,
        tokens: Iterable[tuple[int, int]] = (),
    ) -> OutputProcessorOutput:
        """One batch from the core. Outputs of requests that are unknown (aborted meanwhile) are dropped.

        `engine_core_timestamp`: the core's clock at the step, seconds. `tokens`: (handle, token id) of the requests
        that have one token and no other news.
        """
        result = OutputProcessorOutput()
        if iteration_stats is None and self.tracer is not None:
            iteration_stats = IterationStats()
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None or output.handle not in (0, state.request.handle):
                continue  # where the handle differs: the last of a request that had this id before and was aborted
            if iteration_stats is not None and state.stats is not None:
                iteration_stats.update_from_output(output, engine_core_timestamp, state.stats)
            finish_reason, stop_reason = output.finish_reason, output.stop_reason
            ending = _stopped_by(state.absorb, output)
            if ending is not None:
                if finish_reason is None:
                    result.reqs_to_abort.append(output.request_id)
                finish_reason, stop_reason = ending
            self._advance(state, finish_reason, stop_reason, bool(output.new_token_ids), iteration_stats, result)
        for handle, token_id in tokens:
            state = self._by_handle.get(handle)
            if state is None:
                continue
            if iteration_stats is not None and state.stats is not None:
                iteration_stats.update_from_tokens(1, engine_core_timestamp, state.stats)
            ending = _stopped_by(state.absorb_token, token_id)
            if ending is not None:
                result.reqs_to_abort.append(state.request_id)
            finish_reason, stop_reason = ending or (None, None)
            self._advance(state, finish_reason, stop_reason, True, iteration_stats, result)
        return result

    def _advance(
        self,
        state: RequestState | PoolingState,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        has_tokens: bool,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        """Hand out what a batch brought a request; a streamed prompt's goes on to its next piece."""
        goes_on = False
        if state.session_open and finish_reason is not None:
            assert isinstance(state, RequestState)
            goes_on = state.end_piece(finish_reason, stop_reason, has_tokens)
            if not goes_on:  # to the core, a piece that was on its way would begin another request
                result.reqs_to_abort.append(state.request_id)
        request_output = self._emit(state, finish_reason, stop_reason, iteration_stats, goes_on)
        if goes_on:
            assert isinstance(state, RequestState)
            state.begin_next_piece()
            if state.queue is not None:
                state.queue.unanswered_pieces.release()
        if request_output is not None and state.queue is None:
            result.request_outputs.append(request_output)

    def abort_requests(
        self, request_ids: str | Iterable[str], internal: bool, iteration_stats: IterationStats | None = None
    ) -> list[str]:
        """End one request or several, by the caller's ids or internal ones (a parent's stands for its children).

        Whoever waits on a collector gets a last output with "abort". Returns the internal ids that the core is to
        abort; unknown ids are passed over.
        """
        if not isinstance(request_ids, Iterable):
            reject_type("request_ids", request_ids, "a request's id, or a sequence of them")
        aborted = []
        for given_id in (request_ids,) if isinstance(request_ids, str) else request_ids:
            for request_id in self._running_ids(given_id, internal):
                state = self.request_states[request_id]
                _stopped_by(state.absorb, EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT))
                self._emit(state, FinishReason.ABORT, None, iteration_stats)
                aborted.append(request_id)
        return aborted

    def propagate_error(self, error: Exception, iteration_stats: IterationStats | None = None) -> None:
        """Raise `error` in every waiting consumer and forget their requests: nothing more will come for them."""
        for state in list(self.request_states.values()):
            if state.queue is not None:
                state.queue.put(error)
                self._end(state, FinishReason.ERROR, str(error), iteration_stats)

    def _new_state(
        self,
        prepared: PreparedRequest,
        request: EngineCoreRequest,
        parent: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector | None,
    ) -> RequestState | PoolingState:
        stats = RequestStateStats(arrival_time=request.arrival_time) if self.log_stats else None
        if isinstance(prepared.params, PoolingParams):
            return PoolingState(request, queue, stats)
        stream_interval = prepared.params.stream_interval or self.stream_interval
        return RequestState(
            prepared, request, parent, index, queue, self.tokenizer, self._decoder, stats, stream_interval
        )

    def _running_ids(self, given_id: str, internal: bool) -> Sequence[str]:
        if not internal:
            return list(self.external_req_ids.get(given_id, ()))
        parent = self.parent_requests.get(given_id)
        if parent is not None:
            return list(parent.child_ids)
        return [given_id] if given_id in self.request_states else []

    def _emit(
        self,
        state: RequestState | PoolingState,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        iteration_stats: IterationStats | None,
        goes_on: bool = False,
    ) -> EngineOutput | None:
        """Hand out what is due for `state`, and forget it if it has ended. `goes_on`: more prompt may come."""
        completion = state.make_output(finish_reason, stop_reason)
        ended = finish_reason is not None and not goes_on
        if finish_reason is not None and ended:
            self._end(state, finish_reason, stop_reason, iteration_stats)
        if completion is None:
            return None
        request_output = self._wrapped(state, completion, ended)
        if state.queue is not None and request_output is not None:
            state.queue.put(request_output)
        return request_output

    def _wrapped(
        self, state: RequestState | PoolingState, output: CompletionOutput | EngineOutput, ended: bool
    ) -> EngineOutput | None:
        """A completion in the output of its request, which waits for those of its siblings."""
        if isinstance(state, PoolingState):
            assert isinstance(output, PoolingRequestOutput)
            return output
        assert isinstance(output, CompletionOutput)
        if state.parent is None:
            return state.wrap([output], ended)
        completions = state.parent.collect(output)
        return state.wrap(completions, state.parent.finished) if completions else None

    def _end(
        self,
        state: RequestState | PoolingState,
        finish_reason: FinishReason,
        stop_reason: int | str | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        """Forget a request that has ended, once it is counted and traced."""
        self._forget(state)
        if iteration_stats is not None:
            self._record_finished(state, finish_reason, iteration_stats)
        if self.tracer is not None:
            self.tracer.record(state, finish_reason, None if stop_reason is None else str(stop_reason))

    def _forget(self, state: RequestState | PoolingState) -> None:
        del self.request_states[state.request_id]
        self._by_handle.pop(state.request.handle, None)
        siblings = self.external_req_ids[state.external_req_id]
        siblings.discard(state.request_id)
        if not siblings:
            del self.external_req_ids[state.external_req_id]
        if (parent := state.parent) is not None:
            parent.finish_child(state.request_id, state.num_generated)
            if not parent.child_ids:
                self.parent_requests.pop(parent.request_id, None)

    def _record_finished(
        self, state: RequestState | PoolingState, finish_reason: FinishReason, iteration_stats: IterationStats
    ) -> None:
        if state.stats is None:
            return
        iteration_stats.update_from_finished_request(
            finish_reason,
            state.external_req_id,
            len(state.request.prompt_token_ids),
            state.max_tokens,
            state.stats,
            state.num_cached_tokens or 0,
        )
        if isinstance(state, PoolingState):
            return
        parent = state.parent
        if parent is None or parent.finished:
            longest = state.num_generated if parent is None else parent.max_num_generation_tokens
            iteration_stats.max_num_generation_tokens_iter.append(longest)
            iteration_stats.n_params_iter.append(1 if parent is None else parent.n)


def _stopped_by(absorb: Callable[[T], str | None], news: T) -> tuple[FinishReason, int | str] | None:
    """Take in tokens. Where the shell ends the request, how: on a stop string, or because its tokenizer fails."""
    try:
        stop = absorb(news)
    except BaseException as error:
        if may_be_ctrl_c(error):
            raise
        return FinishReason.ERROR, raised_in("the tokenizer's decode", error)
    return None if stop is None else (FinishReason.STOP, stop)
