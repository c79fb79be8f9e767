"""Statistics: what the figures mean, and that there are none where they are off."""

import sys
from typing import Any

import pytest
from prompts import PROMPTS, greedy

from corespan import RequestOutputKind, SamplingParams
from corespan.engine.metrics.loggers import PrefixCacheHitRate
from corespan.engine.metrics.manager import StatLoggerManager
from corespan.engine.metrics.stats import FinishedRequestStats, IterationStats, RequestStateStats
from corespan.protocol.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventType,
    FinishReason,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
)


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


def test_a_request_that_moves_to_a_new_core_is_counted_once() -> None:
    request = RequestStateStats(arrival_time=100.0)
    queued = [EngineCoreEvent(EventType.QUEUED, 1.0), EngineCoreEvent(EventType.SCHEDULED, 3.0)]
    again = [EngineCoreEvent(EventType.QUEUED, 8.0), EngineCoreEvent(EventType.SCHEDULED, 9.0)]
    stats = IterationStats(iteration_timestamp=110.0)

    stats.update_from_output(output([7], queued, PrefillStats(40, 32)), 4.0, request)
    stats.update_from_output(output([8], again), 10.0, request)
    stats.update_from_finished_request(FinishReason.LENGTH, "r", 40, 2, request)

    (finished,) = stats.finished_requests
    assert (finished.queued_time, finished.prefill_time, finished.decode_time) == (2.0, 1.0, 6.0)


def test_a_clock_that_is_set_back_gives_no_negative_times() -> None:
    request = RequestStateStats(arrival_time=100.0)
    stats = IterationStats(iteration_timestamp=40.0)

    stats.update_from_output(output([7]), 4.0, request)
    stats.update_from_finished_request(FinishReason.LENGTH, "r", 3, 1, request)

    assert stats.time_to_first_tokens_iter == [0.0]
    assert stats.finished_requests[0].e2e_latency == 0.0


def forbid(monkeypatch: pytest.MonkeyPatch, cls: type) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a {cls.__name__} was made although statistics are off")

    for module in [module for name, module in sys.modules.items() if name.startswith("corespan.")]:
        if vars(module).get(cls.__name__) is cls:
            monkeypatch.setattr(module, cls.__name__, refuse)


def test_with_statistics_off_neither_shell_nor_core_makes_any(make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_llm(disable_log_stats=True, num_gpu_blocks_override=33).llm_engine
    for cls in (
        IterationStats,
        RequestStateStats,
        FinishedRequestStats,
        StatLoggerManager,
        SchedulerStats,
        EngineCoreEvent,
    ):
        forbid(monkeypatch, cls)

    for number in range(4):
        engine.add_request(str(number), PROMPTS[0], SamplingParams(n=2, max_tokens=6, ignore_eos=True))
    engine.step()
    engine.abort_request(["0"])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    engine.sleep(1)
    engine.wake_up()

    assert {output.metrics for output in outputs} == {None}
    assert engine.logger_manager is None


@pytest.mark.parametrize("kind", list(RequestOutputKind), ids=lambda kind: kind.name.lower())
def test_outputs_carry_their_requests_times(make_llm: Any, kind: RequestOutputKind) -> None:
    engine = make_llm(disable_log_stats=False).llm_engine
    engine.add_request("timed", PROMPTS[0], greedy(4, output_kind=kind))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()

    times = outputs[-1].metrics
    assert times.num_generation_tokens == 4
    assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert times.arrival_time > 0 and times.first_token_latency > 0
