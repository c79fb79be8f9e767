"""Where statistics go: the log line, custom loggers, and what becomes of one that fails."""

import logging
from typing import Any

import pytest
from prompts import PROMPTS, greedy

from corespan.engine.metrics.loggers import LoggingStatLogger, StatLoggerBase
from corespan.engine.metrics.manager import StatLoggerManager
from corespan.engine.metrics.prometheus import PrometheusStatLogger
from corespan.engine.metrics.stats import IterationStats, RequestStateStats
from corespan.protocol.outputs import EngineCoreOutput, PrefillStats, PrefixCacheStats, SchedulerStats


def test_the_log_line_tells_throughput_queues_and_preemptions(make_llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    stat_logger = LoggingStatLogger(make_llm().llm_engine.vllm_config)
    iteration = IterationStats()
    two_tokens = EngineCoreOutput("r", [1, 2], prefill_stats=PrefillStats(10, 4))
    iteration.update_from_output(two_tokens, 1.0, RequestStateStats())
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


class Counting(StatLoggerBase):
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        self.calls: list[str] = []
        self.num_tokens = 0

    def log_engine_initialized(self) -> None:
        self.calls.append(f"up with {self.vllm_config.cache_config.num_gpu_blocks} blocks")

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> Any:
        self.num_tokens += 0 if iteration_stats is None else iteration_stats.num_generation_tokens


class Failing(Counting):
    def record(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("the disk is full")


def test_custom_loggers_of_an_llm_turn_statistics_on_and_the_default_ones_stay_off(make_llm: Any) -> None:
    llm = make_llm(stat_loggers=[Counting, Counting], disable_log_stats=True)
    (output,) = llm.generate(PROMPTS[0], greedy(5), use_tqdm=False)

    first, second = llm.llm_engine.logger_manager.loggers
    assert first.num_tokens == second.num_tokens == 5
    assert first.calls == ["up with 257 blocks"]
    assert output.metrics.num_generation_tokens == 5
    with pytest.raises(RuntimeError, match="disable_log_stats=False"):
        llm.get_metrics()


def test_a_logger_that_fails_is_left_out_and_harms_neither_requests_nor_other_loggers(
    make_llm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(stat_loggers=[Failing, Counting])
    with caplog.at_level(logging.ERROR, logger="corespan.engine"):
        (output,) = llm.generate(PROMPTS[0], greedy(5), use_tqdm=False)

    (left,) = llm.llm_engine.logger_manager.loggers
    assert type(left) is Counting and left.num_tokens == 5
    assert len(output.outputs[0].token_ids) == 5
    assert [record.message for record in caplog.records] == ["Failing failed and is told nothing more"]


def test_a_subclass_of_the_prometheus_logger_takes_the_place_of_the_default_one(make_llm: Any) -> None:
    class Own(PrometheusStatLogger):
        pass

    llm = make_llm(stat_loggers=[Own], disable_log_stats=False)
    llm.generate(PROMPTS[0], greedy(3), use_tqdm=False)

    prometheus = [each for each in llm.llm_engine.logger_manager.loggers if isinstance(each, PrometheusStatLogger)]
    assert [type(each) for each in prometheus] == [Own]
    assert {metric.name: metric for metric in llm.get_metrics()}["vllm:generation_tokens"].value == 3


@pytest.mark.parametrize("given", [5, Counting, [5], ["Counting"], {Counting}])
def test_what_makes_no_loggers_is_refused_before_a_core_is_started(make_llm: Any, given: Any) -> None:
    with pytest.raises(TypeError, match="^stat_loggers must be a sequence of classes, .*, got "):
        make_llm(stat_loggers=given)
