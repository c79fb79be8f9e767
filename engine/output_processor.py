"""Turns `EngineCoreOutput`s into `RequestOutput`s: text, stop strings, log-probabilities, statistics.

Owned by an engine, which feeds it every batch of outputs from the core. It owns all that the shell knows about a
running request; `RequestOutputCollector` carries outputs on to an asyncio consumer.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..protocol.outputs import EngineCoreOutput, FinishReason
from ..protocol.params import RequestOutputKind
from ..protocol.requests import EngineCoreRequest
from .detokenizer import Detokenizer
from .logprobs import (
    FlatLogprobs,
    LogprobsStore,
    PromptLogprobs,
    PromptLogprobsView,
    SampleLogprobs,
    SampleLogprobsView,
    TokenDecoder,
)
from .metrics.stats import IterationStats, RequestStateStats
from .outputs import CompletionOutput, RequestOutput
from .parallel_sampling import ParentRequest
from .tokenizer import Tokenizer


class RequestOutputCollector:
    """One slot between the output processor and a consumer: outputs not fetched yet merge, so none is ever lost.

    Used from one event loop. `request_id` is the internal one.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.request_id = request_id
        self._aggregate = output_kind == RequestOutputKind.DELTA
        self._slot: RequestOutput | Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Never blocks. An exception takes the place of what was there, and nothing takes an exception's."""
        if self._slot is None or isinstance(output, Exception):
            self._slot = output
            self._ready.set()
        elif isinstance(self._slot, RequestOutput):
            self._slot.add(output, aggregate=self._aggregate)

    async def get(self) -> RequestOutput:
        """The next output, waiting for one. Raises the exception that was put."""
        while (output := self.get_nowait()) is None:
            await self._ready.wait()
        return output

    def get_nowait(self) -> RequestOutput | None:
        output, self._slot = self._slot, None
        self._ready.clear()
        if isinstance(output, Exception):
            raise output
        return output


@dataclass(slots=True)
class OutputProcessorOutput:
    """`request_outputs`: those of requests without a collector. `reqs_to_abort`: internal ids the core is to stop."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)


class RequestState:
    """All that the shell keeps of one running request, or of one child of a request with n > 1."""

    __slots__ = (
        "_num_returned",
        "_prompt_logprobs_returned",
        "_stream_interval",
        "detokenizer",
        "external_req_id",
        "flat_logprobs",
        "index",
        "logprobs",
        "num_cached_tokens",
        "output_kind",
        "parent",
        "prompt",
        "prompt_logprobs",
        "queue",
        "request",
        "request_id",
        "stats",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector | None,
        tokenizer: Tokenizer | None,
        decoder: TokenDecoder | None,
        stats: RequestStateStats | None,
        stream_interval: int,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.prompt = prompt
        self.parent = parent
        self.index = index
        self.queue = queue
        self.stats = stats
        self.output_kind = params.output_kind
        self.flat_logprobs = params.flat_logprobs
        self.num_cached_tokens: int | None = None
        self.detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params)
        self.logprobs: LogprobsStore | None = None
        self.prompt_logprobs: LogprobsStore | None = None
        decoder = decoder if params.detokenize else None
        if (top_k := params.num_logprobs) is not None:
            self.logprobs = LogprobsStore(
                top_k, decoder, ranked=params.logprob_token_ids is None, context=request.prompt_token_ids
            )
        if params.prompt_logprobs is not None:
            context = request.prompt_token_ids[:1]
            self.prompt_logprobs = LogprobsStore(params.prompt_logprobs, decoder, context=context)
        self._stream_interval = stream_interval
        self._num_returned = 0  # tokens that outputs have covered
        self._prompt_logprobs_returned = False

    @property
    def num_generated(self) -> int:
        return len(self.detokenizer.token_ids)

    def absorb(self, output: EngineCoreOutput) -> str | None:
        """Take in tokens, text and log-probabilities; returns the stop string that now ends the request."""
        detokenizer = self.detokenizer
        num_before = len(detokenizer.token_ids)
        stop = detokenizer.update(
            output.new_token_ids, output.finish_reason is not None, output.finish_reason is FinishReason.STOP
        )
        if output.prefill_stats is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        if self.logprobs is not None and output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs, len(detokenizer.token_ids) - num_before)
        if self.prompt_logprobs is not None and output.new_prompt_logprobs is not None:
            # A request that moved to a new core computes its prompt again; what is known already stays.
            missing = len(self.request.prompt_token_ids) - 1 - len(self.prompt_logprobs)
            self.prompt_logprobs.append(output.new_prompt_logprobs, missing)
        return stop

    def make_output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> CompletionOutput | None:
        """The answer as its output kind shows it now; None where nothing is due."""
        finished = finish_reason is not None
        num_tokens = len(self.detokenizer.token_ids)
        if not finished:
            if self.output_kind is RequestOutputKind.FINAL_ONLY:
                return None
            if self._stream_interval > 1 and 0 < self._num_returned > num_tokens - self._stream_interval:
                return None
        if self.output_kind is RequestOutputKind.DELTA:
            start = self._num_returned
            text = self.detokenizer.next_text(finished)
        else:
            start = 0
            text = self.detokenizer.text_so_far(finished)
        self._num_returned = num_tokens
        return CompletionOutput(
            self.index,
            text,
            self.detokenizer.token_ids[start:],
            None if self.logprobs is None else self.logprobs.cumulative_logprob,
            None if self.logprobs is None else self._logprobs_from(start),
            None if finish_reason is None else str(finish_reason),
            stop_reason,
        )

    def wrap(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        return RequestOutput(
            self.external_req_id,
            self.prompt,
            self.request.prompt_token_ids,
            None if self.prompt_logprobs is None else self._take_prompt_logprobs(),
            outputs,
            finished,
            self.stats,
            self.num_cached_tokens,
        )

    def _logprobs_from(self, start: int) -> SampleLogprobs:
        assert self.logprobs is not None
        view = SampleLogprobsView(self.logprobs, start, len(self.logprobs))
        return FlatLogprobs.of(view) if self.flat_logprobs else view

    def _take_prompt_logprobs(self) -> PromptLogprobs:
        """With DELTA they come once, with the first output."""
        assert self.prompt_logprobs is not None
        if self.output_kind is RequestOutputKind.DELTA and self._prompt_logprobs_returned:
            return []
        self._prompt_logprobs_returned = True
        view = PromptLogprobsView(self.prompt_logprobs)
        return FlatLogprobs.of(view) if self.flat_logprobs else view


class OutputProcessor:
    """Every running request's state, by internal id. All three tables are empty when nothing runs."""

    def __init__(self, tokenizer: Tokenizer | None, log_stats: bool, stream_interval: int = 1) -> None:
        self.tokenizer = tokenizer
        self.log_stats = log_stats
        self.stream_interval = stream_interval
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self.external_req_ids: dict[str, set[str]] = {}  # the caller's id -> internal ids, children's for n > 1
        self._decoder = TokenDecoder(tokenizer) if tokenizer is not None else None

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt_text: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Expect outputs for `request`, the child `request_index` of `parent_req` if given.

        Raises ValueError where a request with the same internal id is running.
        """
        request_id = request.request_id
        if request_id in self.request_states:
            raise ValueError(f"a request with the id {request_id!r} is running already")
        state = RequestState(
            request,
            prompt_text,
            parent_req,
            request_index,
            queue,
            self.tokenizer,
            self._decoder,
            RequestStateStats(arrival_time=request.arrival_time) if self.log_stats else None,
            self.stream_interval,
        )
        self.request_states[request_id] = state
        self.external_req_ids.setdefault(state.external_req_id, set()).add(request_id)
        if parent_req is not None:
            self.parent_requests[parent_req.request_id] = parent_req
            parent_req.child_ids.add(request_id)

    def process_outputs(
        self,
        engine_core_outputs: Iterable[EngineCoreOutput],
        engine_core_timestamp: float = 0.0,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """One batch from the core. Outputs of requests that are unknown (aborted meanwhile) are dropped.

        `engine_core_timestamp`: the core's clock at the step, seconds.
        """
        result = OutputProcessorOutput()
        states = self.request_states
        for output in engine_core_outputs:
            state = states.get(output.request_id)
            if state is None:
                continue
            if iteration_stats is not None and state.stats is not None:
                iteration_stats.update_from_output(output, engine_core_timestamp, state.stats)
            finish_reason, stop_reason = output.finish_reason, output.stop_reason
            stop = state.absorb(output)
            if stop is not None:
                if finish_reason is None:
                    result.reqs_to_abort.append(output.request_id)
                finish_reason, stop_reason = FinishReason.STOP, stop
            request_output = self._emit(state, finish_reason, stop_reason, iteration_stats)
            if request_output is not None and state.queue is None:
                result.request_outputs.append(request_output)
        return result

    def abort_requests(
        self, request_ids: Iterable[str], internal: bool, iteration_stats: IterationStats | None = None
    ) -> list[str]:
        """End requests by the caller's ids, or by internal ones (a parent's stands for its children).

        Whoever waits on a collector gets a last output with "abort". Returns the internal ids that the core is to
        abort; unknown ids are passed over.
        """
        aborted = []
        for given_id in request_ids:
            for request_id in self._running_ids(given_id, internal):
                state = self.request_states[request_id]
                state.detokenizer.update((), finished=True, stopped_by_token=False)
                self._emit(state, FinishReason.ABORT, None, iteration_stats)
                aborted.append(request_id)
        return aborted

    def propagate_error(self, error: Exception) -> None:
        """Raise `error` in every waiting consumer and forget their requests: nothing more will come for them."""
        for state in list(self.request_states.values()):
            if state.queue is not None:
                state.queue.put(error)
                self._forget(state)

    def _running_ids(self, given_id: str, internal: bool) -> Sequence[str]:
        if not internal:
            return list(self.external_req_ids.get(given_id, ()))
        parent = self.parent_requests.get(given_id)
        if parent is not None:
            return list(parent.child_ids)
        return [given_id] if given_id in self.request_states else []

    def _emit(
        self,
        state: RequestState,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        iteration_stats: IterationStats | None,
    ) -> RequestOutput | None:
        """Hand out what is due for `state`, and forget it if it has ended."""
        completion = state.make_output(finish_reason, stop_reason)
        if finish_reason is not None:
            self._forget(state)
            if iteration_stats is not None:
                self._record_finished(state, finish_reason, iteration_stats)
        if completion is None:
            return None
        parent = state.parent
        if parent is None:
            request_output = state.wrap([completion], finish_reason is not None)
        else:
            completions = parent.collect(completion)
            if not completions:
                return None
            request_output = state.wrap(completions, parent.finished)
        if state.queue is not None:
            state.queue.put(request_output)
        return request_output

    def _forget(self, state: RequestState) -> None:
        del self.request_states[state.request_id]
        siblings = self.external_req_ids[state.external_req_id]
        siblings.discard(state.request_id)
        if not siblings:
            del self.external_req_ids[state.external_req_id]
        if (parent := state.parent) is not None:
            parent.finish_child(state.request_id, state.num_generated)
            if not parent.child_ids:
                self.parent_requests.pop(parent.request_id, None)

    def _record_finished(
        self, state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats
    ) -> None:
        if state.stats is None:
            return
        iteration_stats.update_from_finished_request(
            finish_reason,
            state.external_req_id,
            len(state.request.prompt_token_ids),
            state.request.sampling_params.max_tokens,
            state.stats,
            state.num_cached_tokens or 0,
        )
        parent = state.parent
        if parent is None or parent.finished:
            longest = state.num_generated if parent is None else parent.max_num_generation_tokens
            iteration_stats.max_num_generation_tokens_iter.append(longest)
            iteration_stats.n_params_iter.append(1 if parent is None else parent.n)
