"""POST /v1/responses and the routes on stored responses, seen through OpenAI's client and plain HTTP."""

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from deadlines import DEADLINE
from pydantic import BaseModel
from scripted_model import Scripted

from corespan.protocol.errors import EngineGenerateError
from corespan.server.http import response_store
from corespan.server.http.errors import ApiError
from corespan.server.http.response_store import ResponseStore, StoredResponse

TOOL = {
    "type": "function",
    "name": "pick",
    "parameters": {"type": "object", "properties": {"colour": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "pick", "arguments": {"colour": "red"}}</tool_call>'


class Pick(BaseModel):
    colour: Literal["red", "blue"]


@pytest.fixture(scope="session")
def client(scripted: Scripted) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="EMPTY", max_retries=0)


def _both(client: Any, **request: Any) -> Any:
    """The whole response, once the stream's is found to be the same."""
    request = {"model": "tiny", "input": "Hello world", **request}
    whole = client.responses.create(**request)
    with client.responses.stream(**request) as stream:
        streamed = list(stream)[-1].response
    assert [_plain(item) for item in streamed.output] == [_plain(item) for item in whole.output]
    assert (streamed.status, streamed.usage.output_tokens) == (whole.status, whole.usage.output_tokens)
    return whole


def _plain(item: Any) -> dict[str, Any]:
    plain: dict[str, Any] = item.model_dump(exclude_none=True)
    for part in plain.get("content") or ():
        part.pop("parsed", None)
    return {key: value for key, value in plain.items() if key not in ("id", "call_id", "parsed_arguments")}


def _events(http: httpx.Client, body: dict[str, Any], path: str = "") -> list[dict[str, Any]]:
    if path:
        response = http.get(path)
    else:
        response = http.post("/v1/responses", json={"input": "Hello", **body, "stream": True})
    assert response.status_code == 200, response.text
    events = []
    for each in response.text.removesuffix("\n\n").split("\n\n"):
        name, line = each.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture
def scripted_http(scripted: Scripted) -> Any:
    with httpx.Client(base_url=scripted.url, timeout=DEADLINE) as client:
        yield client


def test_a_real_answer_with_log_probabilities(openai_client: Any) -> None:
    response = _both(
        openai_client,
        max_output_tokens=6,
        temperature=0,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        extra_body={"ignore_eos": True},
    )
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    (message,) = response.output
    assert len(message.content[0].logprobs) == 6 and response.usage.output_tokens == 6


def test_parse_gives_the_model_asked_for(openai_client: Any) -> None:
    parsed = openai_client.responses.parse(
        model="tiny", input="Hello world", text_format=Pick, max_output_tokens=400, temperature=0
    )
    assert parsed.output_parsed.colour in ("red", "blue")


def test_events_come_in_order_and_without_gaps(scripted: Scripted, scripted_http: httpx.Client) -> None:
    scripted.llm.say("<think>hm", "</think>Let me", " see.", CALL)
    events = _events(scripted_http, {"tools": [TOOL]})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    items = {event["output_index"]: event["item"]["id"] for event in events if "item" in event}
    assert all(items[event["output_index"]] == event["item_id"] for event in events if "item_id" in event)
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"


def test_reasoning_text_and_calls_are_items(scripted: Scripted, client: Any) -> None:
    scripted.llm.say("<think>hm", "</think>Let me", " see.", CALL)
    reasoning, message, call = _both(client, tools=[TOOL]).output
    assert reasoning.content[0].text == "hm" and message.content[0].text == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("pick", {"colour": "red"})
    assert call.call_id.startswith("call_")


def test_a_conversation_goes_on_from_a_stored_response(scripted: Scripted, client: Any) -> None:
    scripted.llm.say("I pick. ", CALL)
    first = client.responses.create(model="tiny", input="Pick one", tools=[TOOL], instructions="Be brief")
    scripted.llm.say("fine")
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "done"}
    second = client.responses.create(model="tiny", input=[output], previous_response_id=first.id)
    prompt = scripted.llm.prompts[-1]
    places = [prompt.index(text) for text in ("Pick one", "I pick.", "done")]
    assert places == sorted(places) and "Be brief" not in prompt
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == ["message", "message", "function_call", "function_call_output"]
    page = client.responses.input_items.list(second.id, limit=1)
    assert page.data[0].type == "function_call_output" and page.has_more


def test_responses_are_kept_until_deleted(scripted: Scripted, client: Any) -> None:
    scripted.llm.say("kept")
    made = client.responses.create(model="tiny", input="x", metadata={"a": "b"})
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    client.responses.delete(made.id)
    for attempt in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            attempt(made.id)
    unkept = client.responses.create(model="tiny", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_background_response_can_be_followed_again(scripted: Scripted, scripted_http: httpx.Client) -> None:
    scripted.llm.say("one", " two")
    events = _events(scripted_http, {"background": True})
    assert events[-1]["type"] == "response.completed"
    path = f"/v1/responses/{events[0]['response']['id']}"
    assert _events(scripted_http, {}, f"{path}?stream=true") == events
    assert _events(scripted_http, {}, f"{path}?stream=true&starting_after=3") == events[4:]
    assert scripted_http.get(path).json()["status"] == "completed"
    assert scripted_http.post(f"{path}/cancel").status_code == 400


def test_a_background_response_is_cancelled(openai_client: Any) -> None:
    made = openai_client.responses.create(
        model="tiny", input="x", background=True, max_output_tokens=400, extra_body={"ignore_eos": True}
    )
    assert made.status == "queued"
    assert openai_client.responses.cancel(made.id).status == "cancelled"
    assert openai_client.responses.retrieve(made.id).status == "cancelled"


def test_failures(scripted: Scripted, scripted_http: httpx.Client) -> None:
    failure = EngineGenerateError("boom at /secret/path")
    scripted.llm.say(failure)
    assert scripted_http.post("/v1/responses", json={"input": "x", "stream": True}).status_code == 500
    scripted.llm.say("Hel", failure)
    last = _events(scripted_http, {})[-1]
    assert last["type"] == "error" and last["sequence_number"] == 5 and "secret" not in last["message"]
    last = _events(scripted_http, {"background": True})[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "messages"),
        ({"input": "x", "previous_response_id": "resp_none"}, 404, "previous_response_id"),
        ({"input": "x", "background": True, "store": False}, 400, "background"),
        ({"input": "x", "prompt": {"id": "p"}}, 400, "prompt"),
        ({"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"input": "x", "truncation": "some"}, 400, "truncation"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, 400, "tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, 400, "input.0.type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input.0.arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "messages"),
        (
            {"input": "x", "text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            400,
            "structured_outputs",
        ),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, 400, "response_format.json_schema.schema"),
        ({"input": "x", "model": "other"}, 404, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies(http: httpx.Client, body: dict[str, Any], status: int, param: str, stream: bool) -> None:
    response = http.post("/v1/responses", json={**body, "stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def _stored(number: int, owner: str = "") -> StoredResponse:
    return StoredResponse({"id": f"resp_{number}"}, [], owner)


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    store = ResponseStore()
    for number in range(3):
        store.put(_stored(number))
    store.get("resp_0", "")
    store.put(_stored(3))
    assert len(store) == 3 and store.get("resp_0", "") and store.get("resp_3", "")
    with pytest.raises(ApiError):
        store.get("resp_1", "")
    monkeypatch.setattr(response_store, "MAX_BYTES", 40)
    store.put(_stored(4))
    assert len(store) == 2


def test_stored_responses_expire_and_belong_to_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    store.put(_stored(1, "a"))
    with pytest.raises(ApiError):
        store.get("resp_1", "b")
    monkeypatch.setattr(response_store, "SECONDS_TO_LIVE", -1.0)
    store.put(_stored(2))
    with pytest.raises(ApiError):
        store.get("resp_2", "")
