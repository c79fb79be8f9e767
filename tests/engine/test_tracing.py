"""A span for each request, in the trace that its headers name, with the times both processes measured."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from corespan import AsyncEngineArgs, AsyncLLM, SamplingParams
from corespan.engine.outputs import tracing
from corespan.protocol.outputs import EngineCoreOutput, FinishReason

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.trace import StatusCode  # noqa: E402

ENDPOINT = "http://collector:4317"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"Traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
PARAMS = SamplingParams(temperature=0.5, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "otlp_exporter", lambda _: exporter)
    yield exporter


def spans_of(runner: Any, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    engine = runner.async_llm if runner.kind == "async_mp" else runner.llm.llm_engine
    engine.tracer.close()
    return list(exporter.get_finished_spans())


def test_a_span_tells_a_requests_life(make_runner: Callable[..., Any], exporter: InMemorySpanExporter) -> None:
    runner = make_runner(otlp_traces_endpoint=ENDPOINT, served_model_name="tiny")
    before = time.time_ns()
    (output,) = runner.generate("the quick brown fox", PARAMS)
    after = time.time_ns()

    assert runner.result_of(
        (runner.engine if runner.kind == "async_mp" else runner.llm.llm_engine).is_tracing_enabled()
    )
    (span,) = spans_of(runner, exporter)
    attributes = dict(span.attributes or {})
    assert span.name == "llm_request"
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None and span.end_time is not None
    assert before - 1000 <= span.start_time <= span.end_time <= after + 1000
    assert attributes["gen_ai.request.id"] == output.request_id
    assert attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.top_p"] == 0.9
    assert attributes["gen_ai.request.max_tokens"] == 6
    assert attributes["gen_ai.request.n"] == 1
    assert attributes["gen_ai.usage.prompt_tokens"] == len(output.prompt_token_ids)
    assert attributes["gen_ai.usage.completion_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    times = {name: value for name, value in attributes.items() if name.startswith("gen_ai.latency.")}
    assert set(times) == {
        f"gen_ai.latency.{phase}"
        for phase in (
            "e2e",
            "time_in_queue",
            "time_to_first_token",
            "time_in_model_prefill",
            "time_in_model_decode",
            "time_in_model_inference",
        )
    }
    assert all(isinstance(value, float) and 0 <= value <= times["gen_ai.latency.e2e"] for value in times.values())
    assert [event.name for event in span.events] == ["queued", "scheduled", "first_token"]
    stamps = [event.timestamp for event in span.events]
    assert span.start_time - 10**7 <= stamps[0] <= stamps[1] <= stamps[2] <= span.end_time + 10**7


def test_each_answer_has_a_span_and_statistics_stay_off(
    make_runner: Callable[..., Any], exporter: InMemorySpanExporter
) -> None:
    runner = make_runner(otlp_traces_endpoint=ENDPOINT)
    (output,) = runner.generate("hello", SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True))
    engine = runner.async_llm if runner.kind == "async_mp" else runner.llm.llm_engine
    assert engine.logger_manager is None

    spans = spans_of(runner, exporter)
    assert [(span.attributes or {})["gen_ai.request.id"] for span in spans] == [output.request_id] * 3
    assert {(span.attributes or {})["gen_ai.request.n"] for span in spans} == {3}


async def test_the_span_continues_the_callers_trace_and_an_abort_ends_it(
    tiny_llama_dir: str, exporter: InMemorySpanExporter
) -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=tiny_llama_dir,
            max_model_len=256,
            num_gpu_blocks_override=65,
            disable_log_stats=True,
            otlp_traces_endpoint=ENDPOINT,
        )
    )
    try:
        await engine.pause_generation("keep")  # lest the stream end by itself
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        await engine.add_request("left", "hello", params, trace_headers=HEADERS)
        await engine.abort("left")
    finally:
        engine.shutdown()

    (span,) = exporter.get_finished_spans()
    assert span.context is not None and f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT_ID
    assert (span.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)


def test_a_preemption_is_an_event(make_llm: Callable[..., Any], exporter: InMemorySpanExporter) -> None:
    llm = make_llm(otlp_traces_endpoint=ENDPOINT, max_model_len=128, num_gpu_blocks_override=10, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.generate([f"prompt number {number}" for number in range(4)], params, use_tqdm=False)
    llm.shutdown()

    names = [event.name for span in exporter.get_finished_spans() for event in span.events]
    assert "preempted" in names


def test_a_request_that_fails_has_a_span_with_the_error(
    make_llm: Callable[..., Any], exporter: InMemorySpanExporter
) -> None:
    engine = make_llm(otlp_traces_endpoint=ENDPOINT).llm_engine
    request_id = engine.add_request("fails", "hello", PARAMS)
    failure = EngineCoreOutput(request_id, [], FinishReason.ERROR, "out of paper")
    engine.output_processor.process_outputs([failure])
    engine.shutdown()

    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "out of paper"


def test_without_the_packages_the_engine_says_what_to_install(
    tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ImportError, match=r"otlp_traces_endpoint .*corespan\[tracing\]"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=tiny_llama_dir, otlp_traces_endpoint=ENDPOINT))


def test_without_an_endpoint_nothing_of_it_is_loaded(make_llm: Callable[..., Any]) -> None:
    llm = make_llm()
    assert llm.llm_engine.tracer is None
    assert not llm.llm_engine.is_tracing_enabled()
