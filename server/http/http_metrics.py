"""Counts and durations of HTTP requests for Prometheus, labelled by route, never by raw path."""

from typing import Any

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class HttpMetrics:
    """Does nothing where prometheus_client is not installed."""

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Histogram
        except ImportError:
            self.registry: Any = None
            return
        self.registry = CollectorRegistry()
        labels = ("method", "handler", "status")
        self._requests = Counter("http_requests", "HTTP requests answered", labels, registry=self.registry)
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds to the last byte of the answer",
            ("method", "handler"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stream_errors = Counter(
            "http_stream_errors", "Streams that ended in an error event", registry=self.registry
        )

    def count(self, method: str, handler: str, status: int, seconds: float) -> None:
        if self.registry is not None:
            self._requests.labels(method, handler, str(status)).inc()
            self._seconds.labels(method, handler).observe(seconds)

    def count_stream_error(self) -> None:
        if self.registry is not None:
            self._stream_errors.inc()
