"""The application: every route with its handler, and the layers around them."""

import asyncio
import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import admin, lora, openapi, page, pooling, probes, text
from .anthropic import count_tokens, create_message
from .anthropic_schema import MessagesRequest
from .chat import create_chat_completion
from .completions import create_completion
from .endpoint import Endpoint, Handler
from .errors import ApiError, as_api_error
from .hang_up import ClientGone
from .middleware import Gate, route_path, style_of
from .pooling_schema import InputRequest, RerankRequest, ScoreRequest
from .response_routes import (
    cancel_response,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from .response_schema import ResponsesRequest
from .responses import error_response
from .schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .server import Server, server_of

logger = logging.getLogger("corespan.server")


ENDPOINTS = (
    *(Endpoint(path, page.page_file, ("GET",), page=True) for path in page.FILES),
    Endpoint("/health", probes.health, ("GET",)),
    Endpoint("/ping", probes.health, ("GET", "POST")),
    Endpoint("/live", probes.live, ("GET",)),
    Endpoint("/version", probes.version, ("GET",)),
    Endpoint("/openapi.json", openapi.openapi, ("GET",)),
    Endpoint("/load", probes.load, ("GET",)),
    Endpoint("/metrics", probes.metrics, ("GET",)),
    Endpoint("/metrics/", probes.metrics, ("GET",)),
    Endpoint("/v1/models", probes.list_models, ("GET",)),
    Endpoint("/v1/models/{name:path}", probes.retrieve_model, ("GET",)),
    Endpoint("/v1/completions", create_completion, generates=True, body=CompletionRequest),
    Endpoint("/v1/completions/render", text.render_completion, body=CompletionRequest),
    Endpoint("/v1/chat/completions", create_chat_completion, generates=True, body=ChatCompletionRequest),
    Endpoint("/v1/chat/completions/render", text.render_chat, body=ChatCompletionRequest),
    Endpoint("/v1/responses", create_response, generates=True, body=ResponsesRequest),
    Endpoint("/v1/responses/{response_id}", retrieve_response, ("GET",)),
    Endpoint("/v1/responses/{response_id}", delete_response, ("DELETE",)),
    Endpoint("/v1/responses/{response_id}/cancel", cancel_response),
    Endpoint("/v1/responses/{response_id}/input_items", list_input_items, ("GET",)),
    Endpoint("/v1/messages", create_message, generates=True, body=MessagesRequest),
    Endpoint("/v1/messages/count_tokens", count_tokens, body=MessagesRequest),
    Endpoint("/tokenize", text.tokenize, body=TokenizeRequest),
    Endpoint("/detokenize", text.detokenize, body=DetokenizeRequest),
    Endpoint("/tokenizer_info", text.tokenizer_info, ("GET",)),
    Endpoint("/v1/embeddings", pooling.embeddings, generates=True, body=InputRequest),
    Endpoint("/pooling", pooling.pooling, generates=True, body=InputRequest),
    Endpoint("/classify", pooling.classify, generates=True, body=InputRequest),
    *(Endpoint(path, pooling.score, generates=True, body=ScoreRequest) for path in ("/score", "/v1/score")),
    *(
        Endpoint(path, pooling.rerank, generates=True, body=RerankRequest)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Endpoint("/v1/load_lora_adapter", lora.load_adapter, admin=True, body=lora.LoadAdapterRequest),
    Endpoint("/v1/unload_lora_adapter", lora.unload_adapter, admin=True, body=lora.UnloadAdapterRequest),
    Endpoint("/sleep", admin.sleep, admin=True),
    Endpoint("/wake_up", admin.wake_up, admin=True),
    Endpoint("/is_sleeping", admin.is_sleeping, ("GET",), admin=True),
    Endpoint("/pause", admin.pause, admin=True),
    Endpoint("/resume", admin.resume, admin=True),
    Endpoint("/is_paused", admin.is_paused, ("GET",), admin=True),
    Endpoint("/reset_prefix_cache", admin.reset_prefix_cache, admin=True),
    Endpoint("/start_profile", admin.start_profile, admin=True),
    Endpoint("/stop_profile", admin.stop_profile, admin=True),
)


def build_app(server: Server) -> Starlette:
    options = server.options
    endpoints = [
        endpoint
        for endpoint in ENDPOINTS
        if (options.enable_admin or not endpoint.admin) and not (options.disable_web_ui and endpoint.page)
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=["x-request-id"],
    )
    app = Starlette(
        routes=[Route(each.path, _guarded(each), methods=list(each.methods)) for each in endpoints],
        middleware=[cors, Middleware(Gate, server=server)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    app.state.server = server
    app.state.openapi = openapi.openapi_document(endpoints)
    return app


def _guarded(endpoint: Endpoint) -> Handler:
    """The handler, with what it raises turned into an answer."""

    async def handle(request: Request) -> Response:
        server = server_of(request)
        style = style_of(endpoint.path, server)
        try:
            if endpoint.generates:
                server.check_admits()
            return await endpoint.handler(request)
        except ClientGone:
            return Response(status_code=499)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return error_response(as_api_error(error, request.headers.get("x-request-id", "-")), style)

    handle.__name__ = getattr(endpoint.handler, "__name__", "handle")
    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such path, no such method."""
    assert isinstance(error, HTTPException)
    path = route_path(request.scope)
    message = str(error.detail)
    if error.status_code == 404:
        known = {endpoint.path for endpoint in ENDPOINTS}
        hint = f"; did you mean /v1{path}?" if f"/v1{path}" in known else ""
        message = f"there is no {path}{hint}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {path}"
    wrapped = ApiError(message, error.status_code, headers=error.headers)
    return error_response(wrapped, style_of(path, server_of(request)))
