"""What the shell keeps of one running request: its text, its log-probabilities, how far its outputs have come.

Owned and driven by the output processor.
"""

from collections import deque

from ...protocol.lora import LoRARequest
from ...protocol.outputs import EngineCoreOutput, FinishReason
from ...protocol.params import RequestOutputKind, SamplingParams
from ...protocol.requests import EngineCoreRequest
from ...protocol.resolved_sampling import ResolvedSampling
from ..metrics.stats import RequestStateStats
from ..requests.prepared_request import PreparedRequest
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .logprobs import (
    FlatLogprobs,
    LogprobsList,
    LogprobsStore,
    PromptLogprobs,
    PromptPositions,
    SampleLogprobs,
    SamplePositions,
    TokenDecoder,
)
from .output_collector import RequestOutputCollector
from .parent_request import ParentRequest
from .request_output import CompletionOutput, RequestOutput


class RequestState:
    """All that the shell keeps of one running request, or of one child of a request with n > 1."""

    __slots__ = (
        "_closing",
        "_num_returned",
        "_piece_start",
        "_pieces",
        "_prompt_logprobs_returned",
        "_stream_interval",
        "ending",
        "detokenizer",
        "external_req_id",
        "flat_logprobs",
        "index",
        "logprobs",
        "num_cached_tokens",
        "output_kind",
        "params",
        "parent",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "queue",
        "request",
        "request_id",
        "session_open",
        "stats",
    )

    def __init__(
        self,
        prepared: PreparedRequest,
        request: EngineCoreRequest,
        parent: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector | None,
        tokenizer: Tokenizer | None,
        decoder: TokenDecoder | None,
        stats: RequestStateStats | None,
        stream_interval: int,
    ) -> None:
        """`request`: that of `prepared`, or its child `index` of `parent`."""
        params = prepared.params
        assert isinstance(params, SamplingParams)
        self.params = params
        self.request = request
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.prompt = prepared.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.parent = parent
        self.index = index
        self.queue = queue
        self.stats = stats
        self.output_kind = prepared.output_kind
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
        self.session_open = request.resumable
        self.ending: tuple[FinishReason, int | str | None] | None = None  # how the last piece of prompt was answered
        self._piece_start = 0  # tokens that answered earlier pieces
        self._pieces: deque[tuple[EngineCoreRequest, str | None]] = deque()
        self._closing = False

    @property
    def max_tokens(self) -> int | None:
        assert isinstance(self.request.params, ResolvedSampling)
        return self.request.params.max_tokens

    @property
    def num_generated(self) -> int:
        return len(self.detokenizer.token_ids)

    def absorb_token(self, token_id: int) -> str | None:
        """As `absorb`, of a token of which there is nothing else to say."""
        return self.detokenizer.update((token_id,), False, False)

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
            missing = len(self.prompt_token_ids) - 1 - len(self.prompt_logprobs)
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
            self.lora_request,
        )

    def wrap(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        return RequestOutput(
            self.external_req_id,
            self.prompt,
            self.prompt_token_ids,
            None if self.prompt_logprobs is None else self._take_prompt_logprobs(),
            outputs,
            finished,
            self.stats,
            self.num_cached_tokens,
            self.lora_request,
        )

    @property
    def lora_request(self) -> LoRARequest | None:
        return None if self.request.adapter is None else self.request.adapter.request

    def add_piece(self, request: EngineCoreRequest, prompt: str | None) -> None:
        """More of a streamed prompt; one that is not resumable says that no more will come."""
        if not request.resumable:
            self._closing = True
        elif self.ending is None:
            self._pieces.append((request, prompt))
        else:
            self._begin_piece(request, prompt)

    def end_piece(self, finish_reason: FinishReason, stop_reason: int | str | None, has_tokens: bool) -> bool:
        """A piece of a streamed prompt has its answer; whether the request goes on.

        An answer without tokens, or an error, is the core's word that it ended the request.
        """
        if not has_tokens or finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return False
        self.ending = (finish_reason, stop_reason)
        return bool(self._pieces) or not self._closing

    def begin_next_piece(self) -> None:
        """Go on with the piece that came meanwhile, if one did."""
        if self._pieces:
            self._begin_piece(*self._pieces.popleft())

    def _begin_piece(self, request: EngineCoreRequest, prompt: str | None) -> None:
        """The core has dropped the last token, which was never an input of the model, and goes on behind the rest."""
        answer = self.detokenizer.token_ids[self._piece_start : -1]
        self.prompt_token_ids = [*self.prompt_token_ids, *answer, *request.prompt_token_ids]
        self.prompt = None if self.prompt is None or prompt is None else self.prompt + prompt
        self.request = request
        self.detokenizer.continue_behind(self.prompt_token_ids)
        self._piece_start = len(self.detokenizer.token_ids)
        self._prompt_logprobs_returned = False
        self.ending = None

    def _logprobs_from(self, start: int) -> SampleLogprobs:
        assert self.logprobs is not None
        positions = SamplePositions(self.logprobs, start, len(self.logprobs))
        return FlatLogprobs.of(positions) if self.flat_logprobs else LogprobsList(positions)

    def _take_prompt_logprobs(self) -> PromptLogprobs:
        """With DELTA they come once, with the first output."""
        assert self.prompt_logprobs is not None
        if self.output_kind is RequestOutputKind.DELTA and self._prompt_logprobs_returned:
            return []
        self._prompt_logprobs_returned = True
        positions = PromptPositions(self.prompt_logprobs)
        return FlatLogprobs.of(positions) if self.flat_logprobs else LogprobsList(positions)
