"""The engine's figures as Prometheus metrics under vLLM's names. Needs the extra `metrics` (prometheus_client)."""

import weakref
from collections.abc import Iterator, Sequence

import msgspec
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ...protocol.config import VllmConfig
from ...protocol.outputs import FinishReason, SchedulerStats, SpecDecodingStats
from .loggers import StatLoggerBase
from .stats import FinishedRequestStats, IterationStats

PREFIX = "vllm:"
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level
LABELS = ("model_name", "engine")

_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class PrometheusStatLogger(StatLoggerBase):
    """`collectors` are this engine's own. The global registry shows those of every engine of the process, as long as
    the engine is there; of several under the same labels, the latest.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        self.collectors: list[Counter | Gauge | Histogram] = []
        self._labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._make_scheduler_metrics()
        self._make_draft_metrics()
        self._make_token_metrics()
        self._make_request_metrics()
        self._describe_cache()
        self.record_sleep_state()
        ENGINES.add(self)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """An engine that sleeps at level 0, which is a pause, is in none of the states."""
        for state_level, state in enumerate(SLEEP_STATES):
            is_state = level == state_level > 0 if sleep else state_level == 0
            self._sleep_state.labels(*self._labels, state).set(int(is_state))

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self._running.set(stats.num_running_reqs)
        self._waiting.set(stats.num_waiting_reqs)
        self._waiting_for_capacity.set(stats.num_waiting_reqs - stats.num_skipped_waiting_reqs)
        self._waiting_deferred.set(stats.num_skipped_waiting_reqs)
        self._kv_cache_usage.set(stats.kv_cache_usage)
        self._prefix_cache_queries.inc(stats.prefix_cache_stats.queries)
        self._prefix_cache_hits.inc(stats.prefix_cache_stats.hits)
        self._preemptions.inc(stats.num_preemptions)
        if stats.spec_decoding_stats is not None:
            self._record_drafts(stats.spec_decoding_stats)

    def _record_drafts(self, stats: SpecDecodingStats) -> None:
        self._drafts.inc(stats.num_drafts)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted_tokens.inc(stats.num_accepted_tokens)
        for counter, count in zip(self._accepted_by_position, stats.num_accepted_tokens_per_pos, strict=True):
            counter.inc(count)

    def _record_iteration(self, stats: IterationStats) -> None:
        prompt = stats.prompt_token_stats
        self._prompt_tokens.inc(prompt.total)
        self._prompt_tokens_computed.inc(prompt.computed)
        self._prompt_tokens_hit.inc(prompt.cached)
        self._prompt_tokens_cached.inc(prompt.cached)
        self._generation_tokens.inc(stats.num_generation_tokens)
        if tokens := prompt.computed + stats.num_generation_tokens:
            self._iteration_tokens.observe(tokens)
        for histogram, values in (
            (self._time_to_first_token, stats.time_to_first_tokens_iter),
            (self._inter_token_latency, stats.inter_token_latencies_iter),
            (self._max_generation_tokens, stats.max_num_generation_tokens_iter),
            (self._n, stats.n_params_iter),
        ):
            for value in values:
                histogram.observe(value)
        for finished in stats.finished_requests:
            self._record_finished(finished)

    def _record_finished(self, finished: FinishedRequestStats) -> None:
        self._success[finished.finish_reason].inc()
        self._request_prompt_tokens.observe(finished.num_prompt_tokens)
        self._request_computed_tokens.observe(finished.num_prompt_tokens - finished.num_cached_tokens)
        self._request_generation_tokens.observe(finished.num_generation_tokens)
        if finished.max_tokens_param is not None:
            self._max_tokens.observe(finished.max_tokens_param)
        self._e2e_latency.observe(finished.e2e_latency)
        self._queue_time.observe(finished.queued_time)
        self._prefill_time.observe(finished.prefill_time)
        self._inference_time.observe(finished.inference_time)
        self._decode_time.observe(finished.decode_time)
        self._time_per_output_token.observe(finished.mean_time_per_output_token)

    def _make_scheduler_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that are not in the batch.")
        by_reason = Gauge(
            PREFIX + "num_requests_waiting_by_reason",
            "capacity: for a place in the batch or blocks; deferred: for something else, such as a grammar.",
            (*LABELS, "reason"),
            registry=None,
        )
        self.collectors.append(by_reason)
        self._waiting_for_capacity = by_reason.labels(*self._labels, "capacity")
        self._waiting_deferred = by_reason.labels(*self._labels, "deferred")
        self._kv_cache_usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self._prefix_cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._prefix_cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._preemptions = self._counter("num_preemptions", "Requests that lost their blocks to others.")
        self._sleep_state = Gauge(
            PREFIX + "engine_sleep_state", "1 for the state it is in.", (*LABELS, "sleep_state"), registry=None
        )
        self.collectors.append(self._sleep_state)

    def _make_draft_metrics(self) -> None:
        config = self.vllm_config.speculative_config
        if config is None:
            return
        self._drafts = self._counter("spec_decode_num_drafts", "Drafts of further tokens.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens of drafts.")
        self._accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Tokens of drafts that held.")
        by_position = Counter(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that held, by their place in the draft.",
            (*LABELS, "position"),
            registry=None,
        )
        self.collectors.append(by_position)
        places = range(config.num_speculative_tokens)
        self._accepted_by_position = [by_position.labels(*self._labels, str(place)) for place in places]

    def _make_token_metrics(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        by_source = Counter(
            PREFIX + "prompt_tokens_by_source", "Prompt tokens by origin.", (*LABELS, "source"), registry=None
        )
        self.collectors.append(by_source)
        self._prompt_tokens_computed = by_source.labels(*self._labels, "local_compute")
        self._prompt_tokens_hit = by_source.labels(*self._labels, "local_cache_hit")
        self._prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens that came from the cache.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._iteration_tokens = self._histogram("iteration_tokens_total", "Tokens of a step.", _ITERATION_TOKENS)
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _TOKEN_SECONDS
        )

    def _make_request_metrics(self) -> None:
        success = Counter(PREFIX + "request_success", "Finished requests.", (*LABELS, "finished_reason"), registry=None)
        self.collectors.append(success)
        self._success = {reason: success.labels(*self._labels, str(reason)) for reason in FinishReason}
        lengths = tuple(one_two_five(self.vllm_config.model_config.max_model_len))
        histogram = self._histogram
        self._request_prompt_tokens = histogram("request_prompt_tokens", "Prompt length.", lengths)
        self._request_generation_tokens = histogram("request_generation_tokens", "Tokens generated.", lengths)
        self._request_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", lengths
        )
        self._max_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Length of a request's longest answer.", lengths
        )
        self._max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", lengths)
        self._n = histogram("request_params_n", "The parameter n.", (1, 2, 5, 10, 20))
        self._time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens.", _TOKEN_SECONDS
        )
        self._e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to end.", _REQUEST_SECONDS)
        self._queue_time = histogram("request_queue_time_seconds", "Waiting to be scheduled.", _REQUEST_SECONDS)
        self._inference_time = histogram("request_inference_time_seconds", "Scheduled to end.", _REQUEST_SECONDS)
        self._prefill_time = histogram("request_prefill_time_seconds", "Scheduled to first token.", _REQUEST_SECONDS)
        self._decode_time = histogram("request_decode_time_seconds", "First token to end.", _REQUEST_SECONDS)

    def _describe_cache(self) -> None:
        cache_config = {key: str(value) for key, value in msgspec.to_builtins(self.vllm_config.cache_config).items()}
        labels = {**cache_config, "engine": self._labels[1]}
        gauge = Gauge(
            PREFIX + "cache_config_info", "The KV cache's configuration, as labels.", list(labels), registry=None
        )
        gauge.labels(**labels).set(1)
        self.collectors.append(gauge)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        gauge = Gauge(PREFIX + name, meaning, LABELS, registry=None)
        self.collectors.append(gauge)
        return gauge.labels(*self._labels)

    def _counter(self, name: str, meaning: str) -> Counter:
        counter = Counter(PREFIX + name, meaning, LABELS, registry=None)
        self.collectors.append(counter)
        return counter.labels(*self._labels)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(PREFIX + name, meaning, LABELS, buckets=buckets, registry=None)
        self.collectors.append(histogram)
        return histogram.labels(*self._labels)


class _EngineMetrics(Collector):
    """What the global registry knows of the engines of this process."""

    def __init__(self) -> None:
        self._loggers: list[weakref.ref[PrometheusStatLogger]] = []

    def add(self, stat_logger: PrometheusStatLogger) -> None:
        self._loggers = [known for known in self._loggers if known() is not None] + [weakref.ref(stat_logger)]

    def collect(self) -> Iterator[Metric]:
        """One family a name, as Prometheus wants it, with the samples of all engines."""
        families: dict[str, Metric] = {}
        samples: dict[str, dict[object, Sample]] = {}
        for stat_logger in filter(None, (known() for known in self._loggers)):
            for family in (family for collector in stat_logger.collectors for family in collector.collect()):
                families.setdefault(family.name, family)
                by_labels = samples.setdefault(family.name, {})
                by_labels |= {(sample.name, *sample.labels.items()): sample for sample in family.samples}
        for name, family in families.items():
            family.samples = list(samples[name].values())
            yield family


ENGINES = _EngineMetrics()
REGISTRY.register(ENGINES)


def one_two_five(largest: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, ... up to `largest`; at least 1."""
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > max(largest, 1):
                return
            yield step * power
        power *= 10
