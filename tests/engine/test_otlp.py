"""Spans on the wire: a collector in the test receives them over OTLP, by gRPC and by HTTP."""

import queue
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import msgspec
import pytest
from bridge import FAKE_EXECUTOR, fake_config

from corespan import AsyncLLM, SamplingParams
from corespan.engine.llm_engine import LLMEngine
from corespan.protocol.config import ObservabilityConfig, VllmConfig

grpc = pytest.importorskip("grpc")
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc  # noqa: E402

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
PROMPT = {"prompt_token_ids": [1, 2, 3]}
PARAMS = SamplingParams(temperature=0.5, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True)
Received = queue.SimpleQueue[Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self.received = received

    def Export(self, request: Any, context: Any) -> Any:
        self.received.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def grpc_collector() -> Iterator[tuple[str, Received]]:
    received: Received = queue.SimpleQueue()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(received), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", received
    server.stop(None).wait()


@pytest.fixture
def http_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Received]]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    received: Received = queue.SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.put(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing to the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["grpc_collector", "http_collector"])
def collector(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def traced_config(endpoint: str) -> VllmConfig:
    return msgspec.structs.replace(
        fake_config(), observability_config=ObservabilityConfig(otlp_traces_endpoint=endpoint)
    )


def spans(received: Received) -> list[Any]:
    """What has arrived; the engine that sent it is shut down."""
    requests = []
    while not received.empty():
        requests.append(received.get())
    return [
        span
        for request in requests
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def trace_async(endpoint: str) -> None:
    engine = AsyncLLM(traced_config(endpoint), FAKE_EXECUTOR)
    async for _ in engine.generate(PROMPT, PARAMS, "traced", trace_headers=HEADERS):
        pass
    async for _ in engine.generate(PROMPT, PARAMS, "rootless"):
        pass
    engine.shutdown()


def check_spans(received: Received) -> None:
    by_id = {attributes(span)["gen_ai.request.id"]: span for span in spans(received)}
    traced, rootless = by_id["traced"], by_id["rootless"]
    assert len(by_id) == 2
    assert (traced.name, traced.trace_id.hex(), traced.parent_span_id.hex()) == ("llm_request", TRACE_ID, PARENT_ID)
    assert traced.trace_state == "vendor=1"
    assert rootless.trace_id.hex() != TRACE_ID and not rootless.parent_span_id
    assert 0 < traced.start_time_unix_nano < traced.end_time_unix_nano
    found = attributes(traced)
    assert found["gen_ai.response.model"] == "fake"
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.n"]) == (6, 1)
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 6)
    phases = ("e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode")
    assert all(found[f"gen_ai.latency.{phase}"] >= 0 for phase in phases)
    assert [event.name for event in traced.events] == ["queued", "scheduled", "first_token"]


async def test_spans_of_an_async_engine_reach_the_collector(collector: tuple[str, Received]) -> None:
    endpoint, received = collector
    await trace_async(endpoint)
    check_spans(received)


@pytest.mark.parametrize("multiprocess", [False, True], ids=["inproc", "sync_mp"])
def test_spans_of_a_sync_engine_reach_the_collector(grpc_collector: tuple[str, Received], multiprocess: bool) -> None:
    endpoint, received = grpc_collector
    engine = LLMEngine(traced_config(endpoint), FAKE_EXECUTOR, multiprocess_mode=multiprocess)
    engine.add_request("traced", PROMPT, PARAMS, trace_headers=HEADERS)
    engine.add_request("rootless", PROMPT, PARAMS)
    while engine.has_unfinished_requests():
        engine.step()
    engine.shutdown()
    check_spans(received)


def test_headers_that_name_no_trace_begin_a_new_one(grpc_collector: tuple[str, Received]) -> None:
    endpoint, received = grpc_collector
    engine = LLMEngine(traced_config(endpoint), FAKE_EXECUTOR)
    engine.add_request("odd", PROMPT, PARAMS, trace_headers={"traceparent": "no such thing", "other": "header"})
    while engine.has_unfinished_requests():
        engine.step()
    engine.shutdown()

    (span,) = spans(received)
    assert not span.parent_span_id and any(span.trace_id)


def test_requests_go_on_where_no_collector_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        engine = LLMEngine(traced_config(f"http://127.0.0.1:{taken.getsockname()[1]}"), FAKE_EXECUTOR)
        engine.add_request("traced", PROMPT, PARAMS, trace_headers=HEADERS)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        engine.shutdown()

    assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 6


def test_another_protocol_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be grpc or http/protobuf"):
        LLMEngine(traced_config("http://127.0.0.1:1"), FAKE_EXECUTOR)
