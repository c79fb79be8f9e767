"""The state that all requests of a server share: its options, its models, what phase it is in, what it counts."""

import time
from collections.abc import AsyncGenerator, Callable
from typing import Literal, cast

from starlette.requests import Request

from ..models import ModelHost
from ..serve_options import ServeOptions
from .errors import ApiError, ErrorStyle, unavailable
from .http_metrics import HttpMetrics
from .peers import Peers
from .response_store import ResponseStore
from .responses import encode
from .sse import DONE, EventStream, event

Phase = Literal["loading", "ready", "draining", "dead"]


class Server:
    """`models` is there once the phase is "ready". `peers`: the other processes of this server, if there are."""

    def __init__(self, options: ServeOptions, peers: Peers | None = None) -> None:
        self.options = options
        self.peers = peers
        self.started = int(time.time())
        self.phase: Phase = "loading"
        self.num_requests = 0
        self.metrics = HttpMetrics()
        self.responses = ResponseStore()
        self._models: ModelHost | None = None

    @property
    def models(self) -> ModelHost:
        """Raises ApiError (503) while there are none."""
        if self._models is None:
            raise unavailable("the model is still loading")
        return self._models

    def ready(self, models: ModelHost) -> None:
        self._models = models
        if self.phase == "loading":
            self.phase = "ready"

    def check_admits(self) -> None:
        """Raises ApiError (503) where no new generation may begin."""
        if self.phase == "draining":
            raise unavailable("the server is shutting down")
        if self.phase == "dead":
            raise ApiError("the engine is down", 503, code="service_unavailable")
        limit = self.options.max_queued_requests
        if limit and self.num_requests > limit:
            raise ApiError(
                f"the server is at its limit of {limit} requests",
                503,
                code="server_overloaded",
                headers={"Retry-After": "1"},
            )

    def metrics_text(self) -> bytes:
        """This process's figures, the engine's and the HTTP server's. Raises ApiError without prometheus_client."""
        try:
            from prometheus_client import REGISTRY, generate_latest
        except ImportError:
            raise ApiError("metrics need prometheus_client: pip install 'corespan[metrics]'", 404) from None
        return generate_latest(REGISTRY) + generate_latest(self.metrics.registry)

    def told_to_peers(self) -> dict[str, Callable[[], bytes]]:
        return {"metrics": self.metrics_text, "load": lambda: str(self.num_requests).encode()}

    def event_stream(
        self,
        events: AsyncGenerator[bytes, None],
        request_id: str,
        error_event: Callable[[ApiError], bytes] | None = None,
        style: ErrorStyle | None = None,
    ) -> EventStream:
        """Without `error_event` in OpenAI's manner: an error is an event, and [DONE] ends the stream in any case."""
        style = style or self.options.error_style
        return EventStream(
            events,
            error_event or (lambda error: event(encode(error.body(style))) + DONE),
            request_id,
            style,
            self.options.sse_keep_alive_interval,
            self.metrics.count_stream_error,
        )


def server_of(request: Request) -> Server:
    return cast(Server, request.app.state.server)
