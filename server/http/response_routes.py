"""POST /v1/responses, and the routes on stored responses: get, delete, cancel, input items."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError, as_api_error
from .hang_up import until_hung_up
from .response_run import Event, ResponseRun
from .response_schema import ResponsesRequest
from .response_store import StoredResponse
from .responses import encode, json_response, read_body
from .server import Server, server_of
from .sse import EventStream, event

MAX_LISTED = 100


async def create_response(request: Request) -> Response:
    body = await read_body(request, ResponsesRequest)
    server, owner = server_of(request), _owner_of(request)
    if server.peers is not None:
        _keep_nothing(body)
    earlier = None
    if body.previous_response_id is not None:
        earlier = server.responses.get(body.previous_response_id, owner, "previous_response_id")
        if earlier.running:
            raise ApiError("the previous response is still running", param="previous_response_id")
    run = ResponseRun(request, body, earlier, server.options.strict_max_tokens)
    if body.background:
        stored = _start(server, run, owner)
        return _event_stream(server, stored.follow(-1), run) if body.stream else json_response(stored.body)
    if body.stream:
        return _event_stream(server, _kept(server, run, owner), run)
    return json_response(await until_hung_up(request, _whole(server, run, owner)))


def _keep_nothing(body: ResponsesRequest) -> None:
    """Where several processes answer, what one keeps another does not find: so nothing is kept.

    Raises ApiError for what cannot do without.
    """
    for name in ("background", "previous_response_id"):
        if getattr(body, name):
            raise ApiError(f"{name} needs a server with one API process: --api-server-count 1", param=name)
    body.store = False


async def _whole(server: Server, run: ResponseRun, owner: str) -> dict[str, Any]:
    async with aclosing(_kept(server, run, owner)) as events:
        async for _ in events:
            pass
    return run.response


async def _kept(server: Server, run: ResponseRun, owner: str) -> AsyncGenerator[Event, None]:
    """The run's events; the response is stored before its last event is out."""
    async with aclosing(run.events(server.models)) as events:
        async for each in events:
            if run.body.stored and run.response["status"] in ("completed", "incomplete"):
                server.responses.put(StoredResponse(run.response, run.items, owner))
            yield each


def _start(server: Server, run: ResponseRun, owner: str) -> StoredResponse:
    """A response in background. It counts as a request, so that shutting down waits for it."""
    stored = StoredResponse(run.response, run.items, owner)
    server.num_requests += 1
    stored.task = asyncio.create_task(_work(server, run, stored))
    server.responses.put(stored)
    return stored


async def _work(server: Server, run: ResponseRun, stored: StoredResponse) -> None:
    try:
        async with aclosing(run.events(server.models)) as events:
            async for each in events:
                stored.add_event(each)
    except asyncio.CancelledError:
        run.cancel()
        raise
    except Exception as error:
        stored.add_event(run.fail(as_api_error(error, run.run.caller.request_id)))
    finally:
        server.num_requests -= 1
        asyncio.get_running_loop().call_soon(stored.wake)  # the task is done by then


def _event_stream(server: Server, events: AsyncGenerator[Event, None], run: ResponseRun | None = None) -> EventStream:
    """A stream in the manner of the responses API: named events, and no [DONE]."""

    def error_event(error: ApiError) -> bytes:
        if run is None:
            return _spelled({"type": "error", "message": error.message, "code": error.code, "param": error.param})
        return _spelled(run.error_event(error))

    return server.event_stream(_spelled_all(events), "-" if run is None else run.run.caller.request_id, error_event)


async def _spelled_all(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for each in events:
            yield _spelled(each)


def _spelled(each: Event) -> bytes:
    return event(encode(each), each["type"])


async def retrieve_response(request: Request) -> Response:
    stored = _stored(request)
    if request.query_params.get("stream", "").lower() != "true":
        return json_response(stored.body)
    if stored.task is None:
        raise ApiError("only a response made with background can be streamed again", param="stream")
    return _event_stream(server_of(request), stored.follow(_number(request, "starting_after", -1)))


async def delete_response(request: Request) -> Response:
    stored = _stored(request)
    server_of(request).responses.delete(stored)
    return json_response({"id": stored.body["id"], "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    stored = _stored(request)
    if stored.task is None or not stored.running:
        what = "is over" if stored.task is not None else "was not made with background"
        raise ApiError(f"the response {what}: it cannot be cancelled")
    stored.task.cancel()
    await asyncio.wait({stored.task})
    stored.body["status"] = "cancelled"  # also where it had not begun to run
    return json_response(stored.body)


async def list_input_items(request: Request) -> Response:
    """All that the response was made from, newest first unless `order=asc`."""
    stored = _stored(request)
    limit = _number(request, "limit", 20)
    if not 1 <= limit <= MAX_LISTED:
        raise ApiError(f"limit must be in 1..{MAX_LISTED}, got {limit}", param="limit")
    response_id = stored.body["id"].removeprefix("resp_")
    items = [{"id": f"item_{response_id}_{number}", **item} for number, item in enumerate(stored.items)]
    if request.query_params.get("order", "desc") != "asc":
        items.reverse()
    if (after := request.query_params.get("after")) is not None:
        known = [item["id"] for item in items]
        if after not in known:
            raise ApiError(f"there is no item {after!r:.100}", param="after")
        items = items[known.index(after) + 1 :]
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


def _stored(request: Request) -> StoredResponse:
    return server_of(request).responses.get(request.path_params["response_id"], _owner_of(request))


def _owner_of(request: Request) -> str:
    """A digest of the caller's key: what one key stored, another does not see."""
    if not server_of(request).options.api_key:
        return ""
    scheme_and_key = request.headers.get("authorization", "").split()
    key = scheme_and_key[-1] if scheme_and_key else request.headers.get("x-api-key", "").strip()
    return hashlib.sha256(key.encode()).hexdigest()


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    try:
        return default if text is None else int(text)
    except ValueError:
        raise ApiError(f"{name} must be an integer, got {text!r:.50}", param=name) from None
