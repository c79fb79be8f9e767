"""Statistics: what the figures mean, the log line, Prometheus' metrics and the snapshot of them."""

import logging
from typing import Any

import pytest

from corespan import SamplingParams
from corespan.engine.metrics.loggers import LoggingStatLogger, PrefixCacheHitRate, StatLoggerManager
from corespan.engine.metrics.prometheus import one_two_five
from corespan.engine.metrics.reader import Counter, Gauge, Histogram
from corespan.engine.metrics.stats import IterationStats, RequestStateStats
from corespan.protocol.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventType,
    FinishReason,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
)

PROMPTS = ["The capital of France is", "Once upon a time"]


def greedy(max_tokens: int = 6, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def output(tokens: list[int], events: Any = None, prefill: Any = None) -> EngineCoreOutput:
    return EngineCoreOutput("r", tokens, events=events, prefill_stats=prefill)


def test_a_requests_phases_are_timed_on_the_cores_clock() -> None:
    request = RequestStateStats(arrival_time=100.0)
    queued = [EngineCoreEvent(EventType.QUEUED, 1.0), EngineCoreEvent(EventType.SCHEDULED, 3.0)]
    again = [EngineCoreEvent(EventType.PREEMPTED, 5.5), EngineCoreEvent(EventType.SCHEDULED, 6.0)]

    first = IterationStats(iteration_timestamp=104.0)
    first.update_from_output(output([7], queued, PrefillStats(40, 32)), 4.0, request)
    second = IterationStats(iteration_timestamp=107.0)
    second.update_from_output(output([8], again), 7.0, request)
    second.update_from_output(output([9]), 9.0, request)
    second.update_from_finished_request(FinishReason.STOP, "r", 40, 16, request, num_cached_tokens=32)

    (finished,) = second.finished_requests
    assert first.time_to_first_tokens_iter == [4.0]
    assert second.inter_token_latencies_iter == [3.0, 2.0]
    assert (first.prompt_token_stats.computed, first.prompt_token_stats.cached, first.num_prompt_tokens) == (8, 32, 40)
    assert second.num_preempted_reqs == 1
    assert (finished.queued_time, finished.prefill_time, finished.decode_time) == (2.0, 1.0, 5.0)
    assert (finished.inference_time, finished.mean_time_per_output_token, finished.e2e_latency) == (6.0, 2.5, 7.0)
    assert (finished.num_generation_tokens, finished.num_prompt_tokens, finished.num_cached_tokens) == (3, 40, 32)


def test_a_request_that_never_ran_has_no_phases() -> None:
    stats = IterationStats(iteration_timestamp=101.0)

    stats.update_from_finished_request(FinishReason.ABORT, "r", 5, None, RequestStateStats(arrival_time=100.0))

    (finished,) = stats.finished_requests
    assert finished.e2e_latency == 1.0
    assert finished.queued_time == finished.prefill_time == finished.decode_time == finished.inference_time == 0.0


def test_the_hit_rate_covers_the_latest_thousand_requests_and_forgets_on_reset() -> None:
    rate = PrefixCacheHitRate()
    assert rate.value == 0.0
    rate.observe(PrefixCacheStats(requests=600, queries=600, hits=600))
    rate.observe(PrefixCacheStats(requests=600, queries=600, hits=0))
    assert rate.value == 0.5
    rate.observe(PrefixCacheStats(requests=400, queries=400, hits=0))
    assert rate.value == 0.0
    rate.observe(PrefixCacheStats(reset=True, requests=1, queries=10, hits=5))
    assert rate.value == 0.5


def test_the_log_line_tells_throughput_queues_and_preemptions(make_llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    stat_logger = LoggingStatLogger(make_llm().llm_engine.vllm_config)
    iteration = IterationStats()
    iteration.update_from_output(output([1, 2], prefill=PrefillStats(10, 4)), 1.0, RequestStateStats())
    stat_logger.record(
        SchedulerStats(
            num_running_reqs=3,
            num_waiting_reqs=2,
            kv_cache_usage=0.25,
            num_preemptions=4,
            prefix_cache_stats=PrefixCacheStats(requests=1, queries=10, hits=4),
        ),
        iteration,
    )

    with caplog.at_level(logging.DEBUG, logger="corespan.engine"):
        stat_logger.log()
        stat_logger.record(SchedulerStats(), None)
        stat_logger.log()
        stat_logger.log()

    busy, idle, still_idle = caplog.records
    assert "Running: 3 reqs, Waiting: 2 reqs" in busy.message
    assert "Preemptions: 4" in busy.message and "Preemptions" not in idle.message
    assert "KV cache usage: 25.0%, Prefix cache hit rate: 40.0%" in busy.message
    assert "Avg generation throughput: 0.0 tokens/s" not in busy.message
    assert [record.levelno for record in (busy, idle, still_idle)] == [logging.INFO, logging.INFO, logging.DEBUG]


def test_lines_are_written_no_more_often_than_the_interval(make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "3600")
    lines: list[None] = []
    manager = StatLoggerManager(make_llm().llm_engine.vllm_config)
    monkeypatch.setattr(manager, "log", lambda: lines.append(None))

    for _ in range(5):
        manager.log_if_due()
    assert lines == []

    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.000001")
    manager = StatLoggerManager(make_llm().llm_engine.vllm_config)
    monkeypatch.setattr(manager, "log", lambda: lines.append(None))
    manager.log_if_due()
    assert lines == [None]


def test_the_snapshot_counts_what_was_done(make_llm: Any) -> None:
    llm = make_llm(disable_log_stats=False, served_model_name="tiny")

    llm.generate([*PROMPTS, PROMPTS[0]], greedy(), use_tqdm=False)
    (several,) = llm.generate(PROMPTS[0], SamplingParams(n=2, max_tokens=4, ignore_eos=True), use_tqdm=False)

    metrics = {(metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()}

    def value(name: str, *labels: str) -> Any:
        return metrics[(f"vllm:{name}", "tiny", "0", *labels)]

    prompt_tokens = sum(len(llm.get_tokenizer().encode(prompt)) for prompt in [*PROMPTS, *[PROMPTS[0]] * 3])
    assert isinstance(value("generation_tokens"), Counter) and value("generation_tokens").value == 3 * 6 + 2 * 4
    assert value("prompt_tokens").value == prompt_tokens
    assert (
        value("prompt_tokens_by_source", "local_compute").value + value("prompt_tokens_cached").value == prompt_tokens
    )
    assert value("request_success", "length").value == 5
    assert isinstance(value("num_requests_running"), Gauge) and value("num_requests_running").value == 0
    assert value("kv_cache_usage_perc").value == 0
    lengths = value("request_generation_tokens")
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum, lengths.buckets["5.0"], lengths.buckets["+Inf"]) == (5, 26, 2, 5)
    assert value("request_params_n").count == 4
    assert value("request_params_n").sum == 5
    assert value("time_to_first_token_seconds").count == 5
    assert value("inter_token_latency_seconds").count == 3 * 5 + 2 * 3
    assert len(several.outputs) == 2


def test_aborted_requests_count_in_the_reasons_and_the_histograms(make_llm: Any) -> None:
    engine = make_llm(disable_log_stats=False).llm_engine
    for number in range(8):
        engine.add_request(str(number), PROMPTS[0], greedy(10))
    engine.step()
    engine.abort_request([str(number) for number in range(5)])
    while engine.has_unfinished_requests():
        engine.step()

    metrics = engine.get_metrics()
    reasons = {
        metric.labels["finished_reason"]: metric.value for metric in metrics if metric.name == "vllm:request_success"
    }
    by_name = {metric.name: metric for metric in metrics}
    assert (reasons["abort"], reasons["length"]) == (5, 3)
    assert by_name["vllm:request_generation_tokens"].count == 8
    assert by_name["vllm:request_generation_tokens"].sum == by_name["vllm:generation_tokens"].value
    assert by_name["vllm:num_requests_running"].value == by_name["vllm:num_requests_waiting"].value == 0


def test_the_sleep_gauge_follows_the_engine(make_llm: Any) -> None:
    llm = make_llm(disable_log_stats=False)

    def state() -> set[str]:
        return {
            metric.labels["sleep_state"]
            for metric in llm.get_metrics()
            if metric.name == "vllm:engine_sleep_state" and metric.value
        }

    assert state() == {"awake"}
    llm.sleep(1)
    assert state() == {"weights_offloaded"}
    llm.wake_up()
    assert state() == {"awake"}


def test_each_engine_reports_its_own_figures_though_the_registry_shows_the_latest(make_llm: Any) -> None:
    from prometheus_client import REGISTRY

    first = make_llm(disable_log_stats=False, served_model_name="first")
    second = make_llm(disable_log_stats=False, served_model_name="second")
    first.generate(PROMPTS[0], greedy(3), use_tqdm=False)

    def generated(llm: Any) -> list[int]:
        return [metric.value for metric in llm.get_metrics() if metric.name == "vllm:generation_tokens"]

    assert (generated(first), generated(second)) == ([3], [0])
    labels = {"model_name": "second", "engine": "0"}
    assert REGISTRY.get_sample_value("vllm:generation_tokens_total", labels) == 0
    assert REGISTRY.get_sample_value("vllm:generation_tokens_total", {**labels, "model_name": "first"}) is None


def test_buckets_of_token_counts_go_up_to_the_models_length() -> None:
    assert list(one_two_five(120)) == [1, 2, 5, 10, 20, 50, 100]
    assert list(one_two_five(0)) == [1]
