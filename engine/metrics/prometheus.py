"""The engine's figures as Prometheus metrics under vLLM's names. Needs the extra `metrics` (prometheus_client)."""

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgspec
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ...protocol.config import VllmConfig
from ...protocol.outputs import FinishReason, SchedulerStats
from .loggers import StatLoggerBase
from .stats import IterationStats

M = TypeVar("M", bound=Counter | Gauge | Histogram)

PREFIX = "vllm:"
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level
LABELS = ("model_name", "engine")

_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TPOT = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


_SCHEDULER: tuple[tuple[type[Counter | Gauge], str, str, str], ...] = (
    (Gauge, "num_requests_running", "Requests in the batch.", "num_running_reqs"),
    (Gauge, "num_requests_waiting", "Requests that are not in the batch.", "num_waiting_reqs"),
    (Gauge, "kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", "kv_cache_usage"),
    (Counter, "prefix_cache_queries", "Prompt tokens looked up in the cache.", "prefix_cache_stats.queries"),
    (Counter, "prefix_cache_hits", "Prompt tokens found in the cache.", "prefix_cache_stats.hits"),
    (Counter, "num_preemptions", "Requests that lost their blocks to others.", "num_preemptions"),
)
_DRAFTS = (
    (Counter, "spec_decode_num_drafts", "Drafts of further tokens.", "num_drafts"),
    (Counter, "spec_decode_num_draft_tokens", "Tokens of drafts.", "num_draft_tokens"),
    (Counter, "spec_decode_num_accepted_tokens", "Tokens of drafts that held.", "num_accepted_tokens"),
)
_ITERATION = (
    (Counter, "prompt_tokens", "Prompt tokens processed.", "prompt_token_stats.total"),
    (Counter, "prompt_tokens_cached", "Prompt tokens that came from the cache.", "prompt_token_stats.cached"),
    (Counter, "generation_tokens", "Tokens generated.", "num_generation_tokens"),
    (Counter, "mm_cache_queries", "Pictures looked up in the cache.", "mm_cache_queries"),
    (Counter, "mm_cache_hits", "Pictures found in the cache.", "mm_cache_hits"),
)
"""Class, name, meaning, and where the value stands: in `SchedulerStats`, `SpecDecodingStats`, `IterationStats`."""

_LENGTHS = ()  # stands for 1, 2, 5, 10, ... up to the model's length
_REQUESTS_OF_ITERATION: tuple[tuple[str, str, Sequence[float], str], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", _TTFT, "time_to_first_tokens_iter"),
    ("inter_token_latency_seconds", "Between two tokens of a request.", _TPOT, "inter_token_latencies_iter"),
    ("request_max_num_generation_tokens", "Length of the longest answer.", _LENGTHS, "max_num_generation_tokens_iter"),
    ("request_params_n", "The parameter n.", (1, 2, 5, 10, 20), "n_params_iter"),
)
_FINISHED_REQUESTS: tuple[tuple[str, str, Sequence[float], str], ...] = (
    ("request_prompt_tokens", "Prompt length.", _LENGTHS, "num_prompt_tokens"),
    ("request_generation_tokens", "Tokens generated.", _LENGTHS, "num_generation_tokens"),
    ("request_prefill_kv_computed_tokens", "Prompt tokens not in the cache.", _LENGTHS, "num_computed_tokens"),
    ("request_params_max_tokens", "The parameter max_tokens.", _LENGTHS, "max_tokens_param"),
    ("request_time_per_output_token_seconds", "Mean time between tokens.", _TPOT, "mean_time_per_output_token"),
    ("e2e_request_latency_seconds", "From arrival to end.", _LATENCY, "e2e_latency"),
    ("request_queue_time_seconds", "Waiting to be scheduled.", _LATENCY, "queued_time"),
    ("request_inference_time_seconds", "Scheduled to end.", _LATENCY, "inference_time"),
    ("request_prefill_time_seconds", "Scheduled to first token.", _LATENCY, "prefill_time"),
    ("request_decode_time_seconds", "First token to end.", _LATENCY, "decode_time"),
)
"""Histograms: name, meaning, buckets, and the field: lists of `IterationStats`, values of `FinishedRequestStats`."""


class PrometheusStatLogger(StatLoggerBase):
    """`collectors` are this engine's own. The global registry shows those of every engine of the process, as long as
    the engine is there; of several under the same labels, the latest.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        self.collectors: list[Counter | Gauge | Histogram] = []
        self._labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._scheduler, self._iteration = self._meters(_SCHEDULER), self._meters(_ITERATION)
        by_reason = self._new(
            Gauge,
            "num_requests_waiting_by_reason",
            "capacity: for a place in the batch or blocks; deferred: for something else, such as a grammar.",
            "reason",
        )
        self._waiting_for_capacity, self._waiting_deferred = by_reason("capacity"), by_reason("deferred")
        self._sleep_state = self._new(Gauge, "engine_sleep_state", "1 for the state it is in.", "sleep_state")
        by_source = self._new(Counter, "prompt_tokens_by_source", "Prompt tokens by origin.", "source")
        self._prompt_tokens_computed, self._prompt_tokens_hit = by_source("local_compute"), by_source("local_cache_hit")
        self._iteration_tokens = self._histogram("iteration_tokens_total", "Tokens of a step.", _ITERATION_TOKENS)
        success = self._new(Counter, "request_success", "Finished requests.", "finished_reason")
        self._success = {reason: success(str(reason)) for reason in FinishReason}
        self._of_iteration = self._histograms(_REQUESTS_OF_ITERATION)
        self._finished = self._histograms(_FINISHED_REQUESTS)
        self._make_draft_metrics()
        self._make_adapter_metrics()
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
            self._sleep_state(state).set(int(is_state))

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        _record_all(self._scheduler, stats)
        self._waiting_for_capacity.set(stats.num_waiting_reqs - stats.num_skipped_waiting_reqs)
        self._waiting_deferred.set(stats.num_skipped_waiting_reqs)
        self._record_adapters(stats)
        if (drafts := stats.spec_decoding_stats) is not None:
            _record_all(self._drafts, drafts)
            for counter, count in zip(self._accepted_by_position, drafts.num_accepted_tokens_per_pos, strict=True):
                counter.inc(count)

    def _record_iteration(self, stats: IterationStats) -> None:
        _record_all(self._iteration, stats)
        self._prompt_tokens_computed.inc(stats.prompt_token_stats.computed)
        self._prompt_tokens_hit.inc(stats.prompt_token_stats.cached)
        if tokens := stats.prompt_token_stats.computed + stats.num_generation_tokens:
            self._iteration_tokens.observe(tokens)
        for histogram, values_of in self._of_iteration:
            for value in values_of(stats):
                histogram.observe(value)
        for finished in stats.finished_requests:
            self._success[finished.finish_reason].inc()
            for histogram, value_of in self._finished:
                if (value := value_of(finished)) is not None:
                    histogram.observe(value)

    def _make_draft_metrics(self) -> None:
        config = self.vllm_config.speculative_config
        if config is None:
            return
        self._drafts = self._meters(_DRAFTS)
        by_position = self._new(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that held, by their place in the draft.",
            "position",
        )
        self._accepted_by_position = [by_position(str(place)) for place in range(config.num_speculative_tokens)]

    def _make_adapter_metrics(self) -> None:
        if self.vllm_config.lora_config is not None:
            names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
            meaning = "The adapters of requests, as labels; the value is when that was so."
            self._adapters = Gauge(PREFIX + "lora_requests_info", meaning, names, registry=None)
            self.collectors.append(self._adapters)

    def _record_adapters(self, stats: SchedulerStats) -> None:
        if (config := self.vllm_config.lora_config) is not None:
            waiting, running = ",".join(stats.waiting_lora_adapters), ",".join(stats.running_lora_adapters)
            self._adapters.clear()  # the present state alone: there are as many label sets as sets of adapters
            self._adapters.labels(str(config.max_loras), waiting, running).set(time.time())

    def _describe_cache(self) -> None:
        cache_config = {key: str(value) for key, value in msgspec.to_builtins(self.vllm_config.cache_config).items()}
        labels = {**cache_config, "engine": self._labels[1]}
        gauge = Gauge(
            PREFIX + "cache_config_info", "The KV cache's configuration, as labels.", list(labels), registry=None
        )
        gauge.labels(**labels).set(1)
        self.collectors.append(gauge)

    def _meters(self, rows: Iterable[tuple[type[Counter | Gauge], str, str, str]]) -> "list[_Meter]":
        return [(self._new(kind, name, meaning)(), attrgetter(place)) for kind, name, meaning, place in rows]

    def _histograms(
        self, rows: Iterable[tuple[str, str, Sequence[float], str]]
    ) -> list[tuple[Histogram, Callable[[object], Any]]]:
        return [(self._histogram(name, meaning, buckets), attrgetter(field)) for name, meaning, buckets, field in rows]

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        lengths = tuple(one_two_five(self.vllm_config.model_config.max_model_len))
        return self._new(Histogram, name, meaning, buckets=buckets or lengths)()

    def _new(self, kind: type[M], name: str, meaning: str, *label: str, **options: Any) -> Callable[..., M]:
        """A metric, which may have a label of its own; called with a value of that, it gives this engine's series."""
        metric = kind(PREFIX + name, meaning, (*LABELS, *label), registry=None, **options)
        self.collectors.append(metric)
        return cast(Callable[..., M], functools.partial(metric.labels, *self._labels))


_Meter = tuple[Counter | Gauge, Callable[[object], float]]


def _record_all(meters: Iterable[_Meter], stats: object) -> None:
    """Counters count up, gauges are set."""
    for metric, value_of in meters:
        if isinstance(metric, Counter):
            metric.inc(value_of(stats))
        else:
            metric.set(value_of(stats))


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
