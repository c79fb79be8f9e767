"""`LLMEngine`: the step loop, its ids, and what it keeps when a request or the core fails."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clients import SMALL_ENGINE
from prompts import greedy

from corespan import EngineArgs, EngineDeadError, LLMEngine, RequestOutput, SamplingParams
from corespan.engine.metrics.loggers import StatLoggerBase

PROMPT = "The capital of France is"


@pytest.fixture
def make_engine(tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLMEngine]]:
    engines = []

    def make(multiprocess: bool = False, stat_loggers: Any = (), **engine_args: Any) -> LLMEngine:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(multiprocess)))
        args = EngineArgs(**{"model": tiny_llama_dir, "disable_log_stats": True, **SMALL_ENGINE, **engine_args})
        engines.append(LLMEngine.from_engine_args(args, stat_loggers=stat_loggers))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("multiprocess", [False, True])
def test_the_toggle_decides_where_the_core_runs(make_engine: Any, multiprocess: bool) -> None:
    engine = make_engine(multiprocess)

    assert hasattr(engine, "model_executor") is not multiprocess
    assert type(engine.engine_core).__name__ == ("SyncMPClient" if multiprocess else "InprocClient")


def test_asking_for_multiprocessing_beats_the_toggle(tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    args = EngineArgs(model=tiny_llama_dir, disable_log_stats=True, **SMALL_ENGINE)

    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=True)

    assert type(engine.engine_core).__name__ == "SyncMPClient"
    engine.shutdown()


def test_from_vllm_config_follows_the_toggle(tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    config = EngineArgs(model=tiny_llama_dir, **SMALL_ENGINE).create_engine_config()

    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)

    assert engine.vllm_config.cache_config.num_gpu_blocks == SMALL_ENGINE["num_gpu_blocks_override"]
    engine.shutdown()


def test_streaming_by_steps_grows_the_text(make_engine: Any) -> None:
    engine = make_engine()
    engine.add_request("grows", PROMPT, greedy(5))

    outputs = run(engine)

    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5]
    assert [output.finished for output in outputs] == [False] * 4 + [True]
    assert {output.request_id for output in outputs} == {"grows"}


def test_outputs_handed_out_do_not_change_afterwards(make_engine: Any) -> None:
    engine = make_engine()
    engine.add_request("kept", PROMPT, greedy(4))
    first = engine.step()[0]
    before = list(first.outputs[0].token_ids)

    run(engine)

    assert first.outputs[0].token_ids == before


def test_a_step_with_nothing_to_do_returns_at_once(make_engine: Any) -> None:
    assert make_engine(multiprocess=True).step() == []


def test_internal_ids_are_unique_and_abort_takes_either(make_engine: Any) -> None:
    engine = make_engine()
    first = engine.add_request("same", PROMPT, greedy(50))
    second = engine.add_request("same", PROMPT, greedy(50))
    other = engine.add_request("other", PROMPT, SamplingParams(n=3, max_tokens=50))
    assert len({first, second, other}) == 3
    assert engine.get_num_unfinished_requests() == 5

    engine.abort_request([first], internal=True)
    assert engine.get_num_unfinished_requests() == 4
    engine.abort_request(["same", "unknown"])
    assert engine.get_num_unfinished_requests() == 3
    engine.abort_request([other], internal=True)

    assert not engine.has_unfinished_requests()
    engine.abort_request([other, first], internal=True)
    assert engine.reset_prefix_cache()


def test_a_failure_between_registering_and_sending_leaves_nothing(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    add_request, sent = engine.engine_core.add_request, []

    def failing_add(request: Any) -> None:
        if sent:
            raise OSError("no more")
        sent.append(request)
        add_request(request)

    monkeypatch.setattr(engine.engine_core, "add_request", failing_add)
    with pytest.raises(OSError, match="no more"):
        engine.add_request("half", PROMPT, SamplingParams(n=3, max_tokens=5))

    assert not engine.has_unfinished_requests()
    assert not engine.output_processor.parent_requests
    assert list(engine.engine_core.get_request_counts()) == [0, 0]


def test_a_failing_model_is_the_death_of_an_in_process_core(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.add_request("doomed", PROMPT, greedy())

    def fail(_: Any) -> Any:
        raise ArithmeticError("the model broke")

    monkeypatch.setattr(engine.model_executor, "execute_model", fail)
    with pytest.raises(EngineDeadError, match="the model broke"):
        run(engine)

    with pytest.raises(EngineDeadError):
        engine.add_request("after", PROMPT, greedy())
    engine.abort_request(["doomed"])
    assert not engine.has_unfinished_requests()


def test_a_prepared_request_cannot_be_used_twice(make_engine: Any) -> None:
    engine = make_engine()
    prepared = engine.input_processor.process_inputs("once", PROMPT, greedy(2))
    engine.add_request("once", prepared, prepared.params)

    with pytest.raises(ValueError, match="once"):
        engine.add_request("once", prepared, prepared.params)

    assert len([output for output in run(engine) if output.finished]) == 1


def test_custom_stat_loggers_see_steps_sleep_and_log_calls(make_engine: Any) -> None:
    events: list[Any] = []

    class Recorder(StatLoggerBase):
        def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
            if scheduler_stats is not None:
                events.append(("running", scheduler_stats.num_running_reqs))

        def log(self) -> None:
            events.append("log")

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            events.append(("sleep", sleep, level))

    engine = make_engine(disable_log_stats=False, stat_loggers=[Recorder])
    engine.add_request("seen", PROMPT, greedy(3))
    run(engine)
    engine.do_log_stats()
    assert events[-1] == "log" and ("running", 1) in events
    events.clear()
    assert engine.logger_manager is not None
    engine.logger_manager._last_log -= 3600
    engine.do_log_stats_with_interval()
    engine.do_log_stats_with_interval()  # too early
    engine.sleep(1)
    engine.wake_up()

    assert events == ["log", ("sleep", 1, 1), ("sleep", 0, 0)]


def test_an_engine_is_stalled_though_the_client_holds_requests_back(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does while others are tried in a new core."""
    engine = make_engine()
    engine.pause_generation("keep")
    for name in ("a", "b", "c"):
        engine.add_request(name, PROMPT, greedy(2))
    monkeypatch.setattr(engine.engine_core, "get_request_counts", lambda: (0, 1))
    assert not engine.is_stalled()
    monkeypatch.setattr(type(engine.engine_core), "num_held_requests", 2)
    assert engine.is_stalled()
