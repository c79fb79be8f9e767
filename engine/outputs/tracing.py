"""OpenTelemetry spans, one for each request or answer of it. Engines build a tracer where `otlp_traces_endpoint` is
set; the output processor tells it of every request's end.
"""

import os
import time
import weakref
from typing import TYPE_CHECKING

from ...protocol.config import VllmConfig
from ...protocol.outputs import FinishReason
from ..metrics.stats import RequestStateStats
from .pooling_state import PoolingState
from .request_state import RequestState

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

SPAN_NAME = "llm_request"


class RequestTracer:
    """Sends spans in the background; what is left goes out with `close`, or when the tracer is dropped.

    A span begins when the request arrived, carries the core's events (queued, scheduled, preempted, first token) and
    continues the trace that the request's `trace_headers` (W3C trace context) name.
    """

    def __init__(self, exporter: "SpanExporter", model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "corespan")})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._model = model
        self._tracer = provider.get_tracer("corespan")
        self._propagator = TraceContextTextMapPropagator()
        self._finalizer = weakref.finalize(self, provider.shutdown)

    def record(self, state: RequestState | PoolingState, finish_reason: FinishReason, error: str | None) -> None:
        """The request has ended now; `error` is what went wrong, if something did."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        stats = state.stats
        assert stats is not None, "a tracer needs the statistics of requests"
        now, clock_offset = time.time(), time.time() - time.monotonic()  # the core's clock is this machine's
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._parent(state.request.trace_headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(state, stats, finish_reason, now),
            start_time=_nanoseconds(stats.arrival_time),
        )
        for name, timestamp in _events(stats):
            span.add_event(name, timestamp=_nanoseconds(timestamp + clock_offset))
        if finish_reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_nanoseconds(now))

    def close(self) -> None:
        """Sends what is left. Repeated calls do nothing."""
        self._finalizer()

    def _parent(self, trace_headers: dict[str, str] | None) -> "Context | None":
        if not trace_headers:
            return None
        return self._propagator.extract({name.lower(): value for name, value in trace_headers.items()})

    def _attributes(
        self, state: RequestState | PoolingState, stats: RequestStateStats, finish_reason: FinishReason, now: float
    ) -> "dict[str, AttributeValue]":
        """Times in seconds; those of a phase that was never reached are left out."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": state.external_req_id,
            "gen_ai.request.n": 1 if state.parent is None else state.parent.n,
            "gen_ai.usage.prompt_tokens": len(state.prompt_token_ids),
            "gen_ai.usage.completion_tokens": state.num_generated,
            "gen_ai.response.finish_reasons": [str(finish_reason)],
            "gen_ai.latency.e2e": now - stats.arrival_time,
        }
        if isinstance(state, RequestState):
            attributes["gen_ai.request.temperature"] = state.params.temperature
            attributes["gen_ai.request.top_p"] = state.params.top_p
        if state.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = state.max_tokens
        if stats.scheduled_ts:
            attributes["gen_ai.latency.time_in_queue"] = stats.scheduled_ts - stats.queued_ts
        if stats.first_token_ts:
            attributes["gen_ai.latency.time_to_first_token"] = stats.first_token_latency
            attributes["gen_ai.latency.time_in_model_prefill"] = stats.first_token_ts - stats.scheduled_ts
            attributes["gen_ai.latency.time_in_model_decode"] = stats.last_token_ts - stats.first_token_ts
            attributes["gen_ai.latency.time_in_model_inference"] = stats.last_token_ts - stats.scheduled_ts
        return attributes


def make_tracer(vllm_config: VllmConfig) -> RequestTracer | None:
    """None where no endpoint is configured.

    Raises ImportError where the packages are missing, ValueError for a protocol that is not there.
    """
    endpoint = vllm_config.observability_config.otlp_traces_endpoint
    if endpoint is None:
        return None
    try:
        return RequestTracer(otlp_exporter(endpoint), vllm_config.model_config.served_model_name)
    except ImportError as error:
        raise ImportError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'corespan[tracing]'"
        ) from error


def otlp_exporter(endpoint: str) -> "SpanExporter":
    """Speaks OTLP as OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says: over "grpc", the default, or "http/protobuf". Encrypted
    where the endpoint begins with https.

    Raises ValueError for another protocol.
    """
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HTTPSpanExporter

        return HTTPSpanExporter(endpoint=endpoint)
    raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be grpc or http/protobuf, got {protocol!r}")


def _events(stats: RequestStateStats) -> list[tuple[str, float]]:
    """(name, seconds on the core's clock) of what has happened, in order."""
    events = [
        ("queued", stats.queued_ts),
        ("scheduled", stats.scheduled_ts),
        ("first_token", stats.first_token_ts),
        *(("preempted", timestamp) for timestamp in stats.preempted_ts),
    ]
    return sorted((event for event in events if event[1]), key=lambda event: event[1])


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
