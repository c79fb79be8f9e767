"""What is counted and timed. The output processor fills an `IterationStats` for every batch of outputs, and a
`RequestStateStats` for every request; with statistics off neither exists.

`*_ts` are seconds on the core's monotonic clock; `arrival_time` and `iteration_timestamp` are wall-clock seconds.
"""

import time
from dataclasses import dataclass, field

from ...protocol.outputs import EngineCoreEvent, EngineCoreOutput, EventType, FinishReason, PrefillStats


@dataclass(slots=True)
class RequestStateStats:
    """One request's life so far. A time of 0.0 has not happened yet."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # seconds from arrival
    num_generation_tokens: int = 0
    preempted_ts: list[float] = field(default_factory=list)


@dataclass(slots=True)
class FinishedRequestStats:
    """A request that has ended. Times in seconds; those of a phase that was never reached are 0.0."""

    finish_reason: FinishReason
    request_id: str
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0

    @property
    def num_computed_tokens(self) -> int:
        """Of the prompt."""
        return self.num_prompt_tokens - self.num_cached_tokens


@dataclass(slots=True)
class PromptTokenStats:
    """Prompt tokens of the requests whose prefill ended in this iteration, by where their KV came from."""

    computed: int = 0
    cached: int = 0

    @property
    def total(self) -> int:
        return self.computed + self.cached


@dataclass(slots=True)
class IterationStats:
    """What one batch of outputs brought."""

    iteration_timestamp: float = field(default_factory=time.time)
    num_generation_tokens: int = 0
    prompt_token_stats: PromptTokenStats = field(default_factory=PromptTokenStats)
    num_preempted_reqs: int = 0
    mm_cache_queries: int = 0  # pictures looked up among those that were prepared before
    mm_cache_hits: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(
        default_factory=list
    )  # longest child, per finished caller request
    n_params_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_token_stats.total

    def update_from_output(
        self, output: EngineCoreOutput, engine_core_timestamp: float, request_stats: RequestStateStats
    ) -> None:
        """Counts one request's new tokens and events; `request_stats` is brought up to date."""
        for event in output.events or ():
            self._update_from_event(event, request_stats)
        if output.prefill_stats is not None:
            self._update_from_prefill(output.prefill_stats)
        if output.new_token_ids:
            self.update_from_tokens(len(output.new_token_ids), engine_core_timestamp, request_stats)

    def update_from_tokens(
        self, num_new_tokens: int, engine_core_timestamp: float, request_stats: RequestStateStats
    ) -> None:
        """As `update_from_output`, where there are tokens and no other news."""
        self.num_generation_tokens += num_new_tokens
        if request_stats.num_generation_tokens == 0:
            request_stats.first_token_ts = engine_core_timestamp
            request_stats.first_token_latency = self._seconds_since(request_stats.arrival_time)
            self.time_to_first_tokens_iter.append(request_stats.first_token_latency)
        else:
            self.inter_token_latencies_iter.append(engine_core_timestamp - request_stats.last_token_ts)
        request_stats.num_generation_tokens += num_new_tokens
        request_stats.last_token_ts = engine_core_timestamp

    def update_from_finished_request(
        self,
        finish_reason: FinishReason,
        request_id: str,
        num_prompt_tokens: int,
        max_tokens_param: int | None,
        request_stats: RequestStateStats,
        num_cached_tokens: int = 0,
    ) -> None:
        """`request_id` is the caller's."""
        started = request_stats.scheduled_ts > 0
        answered = request_stats.num_generation_tokens > 0
        decode_time = request_stats.last_token_ts - request_stats.first_token_ts if answered else 0.0
        gaps = request_stats.num_generation_tokens - 1
        self.finished_requests.append(
            FinishedRequestStats(
                finish_reason=finish_reason,
                request_id=request_id,
                e2e_latency=self._seconds_since(request_stats.arrival_time),
                num_prompt_tokens=num_prompt_tokens,
                num_cached_tokens=num_cached_tokens,
                num_generation_tokens=request_stats.num_generation_tokens,
                max_tokens_param=max_tokens_param,
                queued_time=request_stats.scheduled_ts - request_stats.queued_ts if started else 0.0,
                prefill_time=request_stats.first_token_ts - request_stats.scheduled_ts if started and answered else 0.0,
                inference_time=request_stats.last_token_ts - request_stats.scheduled_ts
                if started and answered
                else 0.0,
                decode_time=decode_time,
                mean_time_per_output_token=decode_time / gaps if gaps > 0 else 0.0,
            )
        )

    def _seconds_since(self, arrival_time: float) -> float:
        """Not below zero, though the machine's clock may have been set back meanwhile."""
        return max(self.iteration_timestamp - arrival_time, 0.0)

    def _update_from_event(self, event: EngineCoreEvent, request_stats: RequestStateStats) -> None:
        """What happens again after a preemption, or in a new core, counts the first time."""
        if event.type == EventType.QUEUED:
            request_stats.queued_ts = request_stats.queued_ts or event.timestamp
        elif event.type == EventType.SCHEDULED:
            request_stats.scheduled_ts = request_stats.scheduled_ts or event.timestamp
        elif event.type == EventType.PREEMPTED:
            self.num_preempted_reqs += 1
            request_stats.preempted_ts.append(event.timestamp)

    def _update_from_prefill(self, prefill: PrefillStats) -> None:
        self.prompt_token_stats.computed += prefill.num_prompt_tokens - prefill.num_cached_tokens
        self.prompt_token_stats.cached += prefill.num_cached_tokens
