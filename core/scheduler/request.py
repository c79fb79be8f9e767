"""A request as the scheduler sees it: its tokens, how many are computed, and when it stops.

Built from the shell's message in the core's input thread; from then on only the scheduler, in the busy loop, changes
it.
"""

import enum
import sys
import time
from collections import deque

import numpy as np

from ...protocol.outputs import EngineCoreEvent, EventType, FinishReason, LogprobsArrays, PrefillStats
from ...protocol.pooling import ResolvedPooling
from ...protocol.repetition import RepetitionDetectionParams
from ...protocol.requests import EngineCoreRequest
from ...protocol.resolved_sampling import ResolvedSampling
from ..kv_cache.block_hash import BlockHasher
from .steady_rows import MAX_END_TOKENS, SteadyRows

NO_ROW = -1

_NOTHING_SAMPLED = ResolvedSampling()


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything above PREEMPTED is the end."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    WAITING_FOR_STREAMING_REQ = 2  # its session is open and the next piece of prompt has not come
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8
    FINISHED_REPETITION = 9

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class Request:
    """One generation request. `token_ids` holds prompt and output; the output starts at `num_prompt_tokens`.

    `num_computed_tokens` counts tokens whose keys and values are in the cache, those of the step being planned
    included. In steady decode both are noted by `SteadyRows` and settled when they are read.
    `has_news`: its next output says more than a token. `pooling`: None of a request that generates.
    `structured_output_state` belongs to the structured-output manager, `drafter` to the proposer of drafts.

    `request_id` is unique in the core, over all its clients (see `core_request_id`); `client_request_id` is what the
    client calls it.
    """

    __slots__ = (
        "request_id",
        "client_request_id",
        "client_index",
        "priority",
        "arrival_time",
        "arrival_order",
        "noise_seed",
        "cache_salt",
        "trace_headers",
        "handle",
        "has_news",
        "_always_has_news",
        "prompt_embeds",
        "mm_features",
        "adapter",
        "resumable",
        "pending_prompts",
        "status",
        "row",
        "stop_reason",
        "_steady",
        "_token_ids",
        "num_prompt_tokens",
        "_num_computed_tokens",
        "num_preemptions",
        "block_hashes",
        "use_structured_output",
        "structured_output_state",
        "drafter",
        "may_speculate",
        "prefill_stats",
        "events",
        "prompt_logprobs",
        "prompt_logprobs_sent",
        "pooling",
        "sampling_params",
        "num_logprobs",
        "skip_reading_prefix_cache",
        "_block_hasher",
        "_max_model_len",
        "_eos_token_id",
        "_stop_token_ids",
        "_end_token_ids",
        "_check_from",
        "_min_num_tokens",
        "_max_num_tokens",
        "_repetition",
    )

    def __init__(self, request: EngineCoreRequest, block_hasher: BlockHasher | None = None) -> None:
        self.request_id = core_request_id(request.client_index, request.request_id)
        self.client_request_id = request.request_id
        self.client_index = request.client_index
        self.priority = request.priority
        self.arrival_time = request.arrival_time
        self.arrival_order = 0  # given by the scheduler, unique
        self.noise_seed = request.noise_seed
        self.cache_salt = request.cache_salt
        self.trace_headers = request.trace_headers
        self.handle = request.handle
        self.prompt_embeds = request.prompt_embeds
        self.mm_features = request.mm_features
        self.adapter = request.adapter
        self.resumable = request.resumable
        self.pending_prompts: deque[Request] = deque()  # of a streamed prompt; a non-resumable one ends it

        self.status = RequestStatus.WAITING
        self.row = NO_ROW  # of the batch, while it runs
        self.stop_reason: int | str | None = None
        self._steady: SteadyRows | None = None
        self._token_ids = [*_prompt_token_ids(request), *request.output_token_ids]
        self.num_prompt_tokens = len(self._token_ids) - len(request.output_token_ids)
        self._num_computed_tokens = 0
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []
        self.structured_output_state: object = None
        self.drafter: object = None
        self.prefill_stats: PrefillStats | None = None
        self.events: list[EngineCoreEvent] = []
        self.prompt_logprobs: list[LogprobsArrays] = []  # chunks not sent yet
        self.prompt_logprobs_sent = bool(request.output_token_ids)

        self._block_hasher = block_hasher
        self._max_model_len = sys.maxsize
        if isinstance(request.params, ResolvedPooling):
            self.pooling: ResolvedPooling | None = request.params
            self._set_sampling_params(_NOTHING_SAMPLED)
            self.skip_reading_prefix_cache = self.pooling.skip_reading_prefix_cache
        else:
            self.pooling = None
            self._set_sampling_params(request.params)
        self.extend_block_hashes()

    @classmethod
    def from_engine_core_request(cls, request: EngineCoreRequest, block_hasher: BlockHasher | None) -> "Request":
        """Prepare a request for `Scheduler.add_request`; `block_hasher` is None when prefix caching is off.

        Hashes the prompt, so it is worth calling outside the busy loop. Raises ValueError for an empty prompt.
        """
        return cls(request, block_hasher)

    @property
    def token_ids(self) -> list[int]:
        if self._steady is not None:
            self._settle(self._steady)
        return self._token_ids

    @property
    def num_computed_tokens(self) -> int:
        if self._steady is not None:
            self._settle(self._steady)
        return self._num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self._steady is not None:
            self._settle(self._steady)
        self._num_computed_tokens = value

    def _settle(self, steady: SteadyRows) -> None:
        new_token_ids, num_computed = steady.settle(self.row)
        self._token_ids += new_token_ids
        self._num_computed_tokens += num_computed

    def enter_steady(self, steady: SteadyRows) -> None:
        """From here on `steady` notes its tokens, if nothing but a token is said of it and it may end in no other way
        than by an end token or its length. It runs, and all its tokens are computed but the last."""
        if not self.has_news and self._repetition is None and len(self._end_token_ids) <= MAX_END_TOKENS:
            steady.enter(
                self.row, self.num_tokens, self._check_from, self._end_token_ids, self.client_index, self.handle
            )
            self._steady = steady

    def leave_steady(self) -> None:
        if self._steady is not None:
            self._settle(self._steady)
            self._steady.leave(self.row)
            self._steady = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def finish_reason(self) -> FinishReason | None:
        return FINISH_REASONS.get(self.status)

    @property
    def has_all_tokens(self) -> bool:
        """Whether no further token may be generated; true of a restarted request that was about to finish."""
        return len(self.token_ids) >= self._max_num_tokens

    @property
    def num_tokens_left(self) -> int:
        """How many further tokens may be generated."""
        return self._max_num_tokens - len(self.token_ids)

    def limit_length(self, max_model_len: int) -> None:
        """No token beyond `max_model_len` is generated, whatever `max_tokens` and `min_tokens` say."""
        self._max_model_len = max_model_len
        if self.pooling is None:
            self._set_sampling_params(self.sampling_params)

    def extend_block_hashes(self) -> None:
        if self._block_hasher is not None:
            digest = None if self.adapter is None else self.adapter.digest
            self._block_hasher.extend(
                self.block_hashes, self.token_ids, self.cache_salt, self.prompt_embeds, digest, self.mm_features
            )

    def append_output_token(self, token_id: int) -> bool:
        """Add a sampled token; True when it is the last one, and then `status` and `stop_reason` say why.

        An end token counts as such even where the length would end the request too, and the length before a
        repetition.
        """
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id not in self._end_token_ids and len(token_ids) < self._check_from:
            return False
        return len(token_ids) >= self._min_num_tokens and self._ends_with(token_id, len(token_ids))

    def _ends_with(self, token_id: int, num_tokens: int) -> bool:
        if token_id == self._eos_token_id:
            self.status = RequestStatus.FINISHED_STOPPED
        elif token_id in self._stop_token_ids:
            self.status = RequestStatus.FINISHED_STOPPED
            self.stop_reason = token_id
        elif num_tokens >= self._max_num_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
        elif self._repetition is not None and self._ends_in_repetition(self._repetition):
            self.status = RequestStatus.FINISHED_REPETITION
            self.stop_reason = "repetition_detected"
        else:
            return False
        return True

    def record_event(self, event_type: EventType) -> None:
        self.events.append(EngineCoreEvent(event_type, time.monotonic()))
        self.has_news = True

    def news_sent(self) -> None:
        """An output has said what there was to say."""
        self.has_news = self._always_has_news

    def reset_progress(self) -> None:
        """Nothing is computed any more; what was sampled stays and is computed again."""
        self.num_computed_tokens = 0
        self.prompt_logprobs.clear()

    def continue_with(self, piece: "Request") -> None:
        """Go on with the next piece of a streamed prompt: all tokens so far become prompt, and the piece follows.

        The token sampled last is dropped: it ended the piece before and was never an input of the model.
        """
        self.token_ids[-1:] = piece.token_ids
        self.drafter = None
        self.num_prompt_tokens = len(self.token_ids)
        self.block_hashes.clear()
        self.reset_progress()
        self.prompt_logprobs_sent = False
        self.prefill_stats = None
        self.stop_reason = None
        self.structured_output_state = piece.structured_output_state
        self.arrival_time = piece.arrival_time
        self.noise_seed = piece.noise_seed
        self.trace_headers = piece.trace_headers
        self._set_sampling_params(piece.sampling_params)

    def _ends_in_repetition(self, params: RepetitionDetectionParams) -> bool:
        """Whether the output's last tokens are one pattern, as often and of such a size as `params` say."""
        token_ids, count = self.token_ids, params.min_count
        last = token_ids[-1]
        largest = min(params.max_pattern_size, self.num_output_tokens // count)
        for size in range(max(params.min_pattern_size, 1), largest + 1):
            if token_ids[-1 - size] == last and token_ids[-size * (count - 1) :] == token_ids[-size * count : -size]:
                return True
        return False

    def _set_sampling_params(self, params: ResolvedSampling) -> None:
        self.sampling_params = params
        self.num_logprobs = params.num_logprobs
        self.use_structured_output = params.structured_outputs is not None
        self.skip_reading_prefix_cache = params.skip_reading_prefix_cache
        self.may_speculate = _draws_alone(params)
        self._always_has_news = self.use_structured_output or self.num_logprobs is not None or self.handle == 0
        self.has_news = True
        self._eos_token_id = params.eos_token_id
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._end_token_ids = self._stop_token_ids.union(() if params.eos_token_id is None else (params.eos_token_id,))
        limit = self._max_model_len
        if params.max_tokens is not None:
            limit = min(limit, self.num_prompt_tokens + params.max_tokens)
        self._max_num_tokens = limit
        repetition = params.repetition_detection
        self._repetition = repetition if repetition is not None and repetition.enabled else None
        self._min_num_tokens = min(self.num_prompt_tokens + params.min_tokens, limit)
        self._check_from = limit if self._repetition is None else 0  # tokens; before, only an end token ends it


def _draws_alone(params: ResolvedSampling) -> bool:
    """Whether a token depends on the logits, the seed and the position only, not on the tokens drawn before it."""
    return not (
        params.structured_outputs is not None
        or params.num_logprobs is not None
        or params.min_tokens
        or params.bad_words_token_ids
        or params.allowed_token_ids
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def core_request_id(client_index: int, request_id: str) -> str:
    """What the core calls a client's request: another name for each pair, and the first client's own in the usual case.

    Clients choose their ids without knowing of each other.
    """
    return request_id if client_index == 0 and ":" not in request_id else f"{client_index}:{request_id}"


def _prompt_token_ids(request: EngineCoreRequest) -> list[int]:
    """The prompt's tokens; zeros stand for positions that embeddings fill."""
    token_ids, embeds = request.prompt_token_ids, request.prompt_embeds
    if embeds is not None:
        num_embeds = int(np.shape(embeds)[0])
        if not token_ids:
            token_ids = [0] * num_embeds
        elif len(token_ids) != num_embeds:
            raise ValueError(f"the prompt has {len(token_ids)} token ids but embeddings for {num_embeds} positions")
    if not token_ids:
        raise ValueError("the prompt is empty; it must have at least one token")
    return token_ids
