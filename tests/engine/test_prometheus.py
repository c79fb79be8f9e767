"""Prometheus' metrics under vLLM's names, in the registry and in `get_metrics()`."""

import gc
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prompts import PROMPTS, greedy

from corespan import SamplingParams
from corespan.engine.metrics.prometheus import one_two_five
from corespan.engine.metrics.reader import Counter, Gauge, Histogram, get_metrics_snapshot
from corespan.protocol.outputs import SchedulerStats


def generated(llm: Any) -> list[int]:
    return [metric.value for metric in llm.get_metrics() if metric.name == "vllm:generation_tokens"]


def test_the_snapshot_counts_what_was_done(make_llm: Any) -> None:
    llm = make_llm(disable_log_stats=False, served_model_name="tiny")

    llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    (several,) = llm.generate(PROMPTS[0], SamplingParams(n=2, max_tokens=4, ignore_eos=True), use_tqdm=False)

    metrics = {(metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()}
    everybodys = {(metric.name, *metric.labels.values()): metric for metric in get_metrics_snapshot()}
    assert {key: everybodys[key] for key in metrics} == metrics

    def value(name: str, *labels: str) -> Any:
        return metrics[(f"vllm:{name}", "tiny", "0", *labels)]

    prompt_tokens = sum(len(llm.get_tokenizer().encode(prompt)) for prompt in [*PROMPTS, PROMPTS[0], PROMPTS[0]])
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


def test_nothing_runs_in_the_gauges_once_everything_was_aborted(make_llm: Any) -> None:
    engine = make_llm(disable_log_stats=False).llm_engine
    for number in range(3):
        engine.add_request(str(number), PROMPTS[0], greedy(50))
    engine.step()
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def values() -> list[float]:
        by_name = {metric.name: metric for metric in engine.get_metrics()}
        return [by_name[name].value for name in gauges]

    assert values()[0] == 3
    engine.abort_request(["0", "1", "2"])
    assert values() == [0, 0, 0]


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
    llm.sleep(2)
    assert state() == {"discard_all"}
    llm.wake_up()
    llm.sleep(0)
    assert state() == set()
    llm.wake_up()
    assert state() == {"awake"}


def test_requests_that_wait_for_a_grammar_are_told_from_those_that_wait_for_room(make_llm: Any) -> None:
    llm = make_llm(disable_log_stats=False)
    llm.llm_engine.logger_manager.record(
        SchedulerStats(num_running_reqs=1, num_waiting_reqs=5, num_skipped_waiting_reqs=2), None
    )

    waiting = {
        metric.labels.get("reason", "all"): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:num_requests_waiting")
    }
    assert waiting == {"all": 5, "capacity": 3, "deferred": 2}


def test_the_registry_shows_every_engine_of_the_process_as_long_as_it_is_there(make_llm: Any) -> None:
    first = make_llm(disable_log_stats=False, served_model_name="first")
    second = make_llm(disable_log_stats=False, served_model_name="second")
    first.generate(PROMPTS[0], greedy(3), use_tqdm=False)
    second.generate(PROMPTS[0], greedy(4), use_tqdm=False)

    def registered(model_name: str) -> float | None:
        labels = {"model_name": model_name, "engine": "0"}
        return REGISTRY.get_sample_value("vllm:generation_tokens_total", labels)

    assert (generated(first), generated(second)) == ([3], [4])
    assert (registered("first"), registered("second")) == (3, 4)
    text = generate_latest().decode()
    assert text.count("# TYPE vllm:generation_tokens_total counter") == 1

    first.llm_engine.logger_manager.loggers.clear()
    first.llm_engine.logger_manager.prometheus = None
    gc.collect()
    assert (registered("first"), registered("second")) == (None, 4)


def test_of_two_engines_under_one_name_the_registry_shows_the_latest(make_llm: Any) -> None:
    first = make_llm(disable_log_stats=False, served_model_name="same")
    second = make_llm(disable_log_stats=False, served_model_name="same")
    first.generate(PROMPTS[0], greedy(3), use_tqdm=False)

    labels = {"model_name": "same", "engine": "0"}
    assert (generated(first), generated(second)) == ([3], [0])
    assert REGISTRY.get_sample_value("vllm:generation_tokens_total", labels) == 0
    sample = 'vllm:generation_tokens_total{engine="0",model_name="same"}'
    assert generate_latest().decode().count(sample) == 1


DASHBOARD_SERIES = """
vllm:cache_config_info
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_count vllm:e2e_request_latency_seconds_sum
vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_count vllm:inter_token_latency_seconds_sum
vllm:iteration_tokens_total_bucket vllm:iteration_tokens_total_count vllm:iteration_tokens_total_sum
vllm:kv_cache_usage_perc
vllm:num_preemptions_total
vllm:num_requests_running
vllm:num_requests_waiting
vllm:num_requests_waiting_by_reason
vllm:prefix_cache_hits_total
vllm:prefix_cache_queries_total
vllm:prompt_tokens_by_source_total
vllm:prompt_tokens_cached_total
vllm:prompt_tokens_total
vllm:request_decode_time_seconds_bucket vllm:request_decode_time_seconds_count vllm:request_decode_time_seconds_sum
vllm:request_generation_tokens_bucket vllm:request_generation_tokens_count vllm:request_generation_tokens_sum
vllm:request_inference_time_seconds_bucket
vllm:request_max_num_generation_tokens_bucket
vllm:request_max_num_generation_tokens_count vllm:request_max_num_generation_tokens_sum
vllm:request_params_max_tokens_bucket
vllm:request_params_n_bucket
vllm:request_prefill_kv_computed_tokens_bucket
vllm:request_prefill_time_seconds_bucket vllm:request_prefill_time_seconds_count vllm:request_prefill_time_seconds_sum
vllm:request_prompt_tokens_bucket vllm:request_prompt_tokens_count vllm:request_prompt_tokens_sum
vllm:request_queue_time_seconds_bucket vllm:request_queue_time_seconds_count vllm:request_queue_time_seconds_sum
vllm:request_success_total
vllm:request_time_per_output_token_seconds_bucket
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_count vllm:time_to_first_token_seconds_sum
""".split()
"""What the queries of vLLM's own Grafana dashboards ask for, but for features that are not there."""


def test_vllms_dashboards_find_every_series_with_the_labels_they_filter_by(make_llm: Any) -> None:
    llm = make_llm(disable_log_stats=False, served_model_name="shown")
    llm.generate(PROMPTS, greedy(), use_tqdm=False)

    shown: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(generate_latest().decode()):
        for sample in family.samples:
            if sample.labels.get("model_name", "shown") == "shown":
                shown.setdefault(sample.name, []).append(sample.labels)

    assert [name for name in DASHBOARD_SERIES if name not in shown] == []
    unlabelled = [name for name in DASHBOARD_SERIES if not all(each.get("engine") == "0" for each in shown[name])]
    assert unlabelled == []
    reasons = {"stop", "length", "abort", "error", "repetition"}
    assert {each["finished_reason"] for each in shown["vllm:request_success_total"]} == reasons
    assert {each["reason"] for each in shown["vllm:num_requests_waiting_by_reason"]} == {"capacity", "deferred"}
    sources = {each["source"] for each in shown["vllm:prompt_tokens_by_source_total"]}
    assert sources == {"local_compute", "local_cache_hit"}
    assert {"block_size", "num_gpu_blocks", "enable_prefix_caching"} <= set(shown["vllm:cache_config_info"][-1])


def test_histograms_have_the_buckets_that_dashboards_and_alerts_were_written_for(make_llm: Any) -> None:
    metrics = {metric.name: metric for metric in make_llm(disable_log_stats=False).get_metrics()}

    def bounds(name: str) -> list[float]:
        return [float(bound) for bound in metrics[f"vllm:{name}"].buckets]

    end = [float("inf")]
    assert bounds("time_to_first_token_seconds")[:6] == [0.001, 0.005, 0.01, 0.02, 0.04, 0.06]
    assert bounds("time_to_first_token_seconds")[-6:] == [40.0, 80.0, 160.0, 640.0, 2560.0] + end
    assert bounds("inter_token_latency_seconds")[:5] == [0.01, 0.025, 0.05, 0.075, 0.1]
    assert bounds("inter_token_latency_seconds") == bounds("request_time_per_output_token_seconds")
    assert bounds("e2e_request_latency_seconds")[:6] == [0.3, 0.5, 0.8, 1.0, 1.5, 2.0]
    assert bounds("e2e_request_latency_seconds")[-4:] == [960.0, 1920.0, 7680.0] + end
    for phase in ("queue", "prefill", "decode", "inference"):
        assert bounds(f"request_{phase}_time_seconds") == bounds("e2e_request_latency_seconds")
    assert bounds("request_params_n") == [1, 2, 5, 10, 20] + end
    assert bounds("iteration_tokens_total") == [1, 8, *(2**power for power in range(4, 15))] + end
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"):
        assert bounds(name) == [1, 2, 5, 10, 20, 50, 100, 200, 500] + end


def test_buckets_of_token_counts_go_up_to_the_models_length() -> None:
    assert list(one_two_five(120)) == [1, 2, 5, 10, 20, 50, 100]
    assert list(one_two_five(0)) == [1]
