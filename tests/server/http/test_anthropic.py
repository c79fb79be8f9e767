"""POST /v1/messages and its count_tokens, seen through Anthropic's client and plain HTTP."""

import json
from typing import Any

import anthropic
import httpx
import pytest
from deadlines import DEADLINE
from http_server import ServerThread
from scripted_model import Scripted

from corespan.protocol.errors import EngineGenerateError
from corespan.server.serve_options import ServeOptions

GREEDY = {"temperature": 0}
HELLO = [{"role": "user", "content": "Hello world"}]
TOOLS = [
    {
        "name": "pick",
        "description": "Picks a colour",
        "input_schema": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    }
]
CALL = '<tool_call>{"name": "pick", "arguments": {"colour": "red"}}</tool_call>'


@pytest.fixture(scope="session")
def client(tiny_server: ServerThread) -> Any:
    return anthropic.Anthropic(base_url=tiny_server.url, api_key="EMPTY", max_retries=0)


@pytest.fixture(scope="session")
def scripted_client(scripted: Scripted) -> Any:
    return anthropic.Anthropic(base_url=scripted.url, api_key="EMPTY", max_retries=0)


def _both(client: Any, **request: Any) -> Any:
    """The whole answer, once the stream's is found to be the same."""
    request = {"model": "tiny", "max_tokens": 12, "messages": HELLO, **request}
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.id.startswith("msg_") and message.type == "message" and message.role == "assistant"
    assert _plain(streamed) == _plain(whole)
    return whole


def _plain(message: Any) -> dict[str, Any]:
    """Without what differs from one request to the next, and what only the client adds."""
    plain = message.model_dump()
    usage = plain["usage"]
    prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    content = [{key: value for key, value in block.items() if value and key != "id"} for block in plain["content"]]
    return {
        "content": content,
        "tokens": (prompt_tokens, usage["output_tokens"]),
        "end": (plain["stop_reason"], plain["stop_sequence"]),
        "model": plain["model"],
    }


def _events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every event of a stream, its name checked against its data."""
    response = httpx.post(
        f"{url}/v1/messages?beta=true", json={"max_tokens": 8, **body, "stream": True}, timeout=DEADLINE
    )
    assert response.status_code == 200, response.text
    bodies = []
    for each in response.text.removesuffix("\n\n").split("\n\n"):
        name, line = each.split("\n")
        bodies.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {bodies[-1]['type']}"
    return bodies


def test_plain_answer(client: Any) -> None:
    message = _both(client, extra_body=GREEDY)
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert [block.type for block in message.content] == ["text"] and message.usage.output_tokens > 0


def test_any_tool_must_be_called(scripted: Scripted, scripted_client: Any) -> None:
    scripted.llm.say('[{"name": "pi', 'ck", "parameters": {"colour"', ': "red"}}]')
    message = _both(scripted_client, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    assert block.name == "pick" and block.input == {"colour": "red"} and block.id.startswith("toolu_")
    held_to = scripted.llm.requests[-1][0].structured_outputs.structural_tag  # the calls may come behind reasoning
    assert '"minItems": 1' in held_to and '"maxItems": 1' in held_to


def test_a_named_tool_is_called(client: Any) -> None:
    message = _both(
        client, tools=TOOLS, tool_choice={"type": "tool", "name": "pick"}, extra_body=GREEDY, max_tokens=400
    )
    (block,) = message.content
    assert message.stop_reason == "tool_use" and block.input["colour"] in ("red", "blue")


def test_output_follows_a_schema(client: Any) -> None:
    schema = TOOLS[0]["input_schema"]
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(
        model="tiny", max_tokens=400, messages=HELLO, extra_body={"temperature": 0, "output_config": config}
    )
    assert json.loads(message.content[0].text)["colour"] in ("red", "blue")


def test_thinking_text_and_calls_are_blocks(scripted: Scripted, scripted_client: Any) -> None:
    scripted.llm.say(
        "<thi", "nk>\nhm", "\n</think>\n\nLet me", " see.", "\n", CALL[:20], CALL[20:50], CALL[50:] + "\n" + CALL
    )
    message = _both(scripted_client, tools=TOOLS)
    thinking, text, first, second = message.content
    assert (thinking.thinking, text.text) == ("hm", "Let me see.\n")
    assert first.input == second.input == {"colour": "red"} and first.id != second.id
    assert message.stop_reason == "tool_use"


def test_one_call_where_parallel_ones_are_off(scripted: Scripted, scripted_client: Any) -> None:
    scripted.llm.say(CALL, "\n" + CALL)
    message = _both(scripted_client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in message.content] == ["tool_use"]


def test_events_come_in_order_with_one_block_open_at_a_time(scripted: Scripted) -> None:
    scripted.llm.say("<think>hm</think>", "\n", CALL)
    events = _events(scripted.url, {"messages": HELLO, "tools": TOOLS})
    types = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert types == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    assert [event["index"] for event in events if "index" in event] == [0] * 3 + [1] * 3
    start = events[0]["message"]
    assert (start["type"], start["role"], start["content"], start["stop_reason"]) == ("message", "assistant", [], None)
    assert events[6]["delta"]["type"] == "input_json_delta" and events[5]["content_block"]["input"] == {}
    assert start["usage"]["cache_read_input_tokens"] == 1


def test_nothing_generated_is_one_empty_text(scripted: Scripted, scripted_client: Any) -> None:
    scripted.llm.say("")
    message = _both(scripted_client)
    assert [(block.type, block.text) for block in message.content] == [("text", "")]
    assert message.stop_reason == "end_turn"


def test_the_stop_sequence_that_hit_is_named(scripted: Scripted, scripted_client: Any) -> None:
    scripted.llm.say("Well", stop_reason="END")
    message = _both(scripted_client, stop_sequences=["END", "###"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert scripted.llm.requests[-1][0].stop == ["END", "###"]


def test_a_stop_sequence_ends_a_real_answer(client: Any) -> None:
    text = _both(client, extra_body=GREEDY).content[0].text
    stop = text[2:4]
    message = _both(client, extra_body=GREEDY, stop_sequences=[stop])
    assert message.stop_sequence == stop and message.content[0].text == text[: text.index(stop)]


def test_a_last_message_of_the_assistant_is_continued(scripted: Scripted, scripted_client: Any) -> None:
    scripted.llm.say("blue")
    message = _both(scripted_client, messages=[*HELLO, {"role": "assistant", "content": "The sky is"}])
    assert message.content[0].text == "blue"
    assert scripted.llm.prompts[-1].endswith("The sky is")


def test_a_conversation_with_tools_reaches_the_template(scripted: Scripted) -> None:
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "Pick", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I pick"},
                {"type": "tool_use", "id": "toolu_1", "name": "pick", "input": {"colour": "red"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "after"},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "done"}]},
            ],
        },
        {"role": "system", "content": "late rule"},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 5"}, {"type": "text", "text": "Be brief"}]
    scripted.llm.say("ok")
    _events(scripted.url, {"messages": conversation, "system": system})
    prompt = scripted.llm.prompts[-1]
    places = [prompt.index(text) for text in ("Be brief", "late rule", "Pick", "I pick", "done", "after")]
    assert places == sorted(places) and "billing" not in prompt


def test_tokens_are_counted_as_they_run(client: Any) -> None:
    message = client.messages.create(model="tiny", max_tokens=1, messages=HELLO, system="Be brief")
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief")
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def _is_error(response: httpx.Response, status: int, kind: str) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == kind and body["error"]["message"]
    assert "request-id" in response.headers or "x-request-id" in response.headers


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": HELLO}, "max_tokens"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5}, "messages"),
        ({"messages": [], "max_tokens": 5}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}], "max_tokens": 5}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}, "messages.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 5},
            "messages.0.content.0",
        ),
        ({"messages": HELLO, "max_tokens": 5, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "max_tokens": 5, "tools": [{"name": "w", "type": "web_search_20250305"}]}, "tools.0"),
        ({"messages": HELLO, "max_tokens": 5, "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"messages": HELLO, "max_tokens": 5, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "'x'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies(http: httpx.Client, body: dict[str, Any], named: str, stream: bool) -> None:
    response = http.post("/v1/messages", json={**body, "stream": stream})
    _is_error(response, 400, "invalid_request_error")
    assert named in response.json()["error"]["message"]


def test_every_refusal_has_anthropics_shape(http: httpx.Client, tiny_server: ServerThread) -> None:
    _is_error(http.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    _is_error(http.get("/v1/messages"), 405, "invalid_request_error")
    _is_error(http.post("/v1/messages/batches", json={}), 404, "not_found_error")
    body = {"messages": HELLO, "max_tokens": 5}
    _is_error(http.post("/v1/messages", json={**body, "model": "other"}), 404, "not_found_error")
    server = tiny_server.server
    server.phase = "draining"
    try:
        _is_error(http.post("/v1/messages", json=body), 529, "overloaded_error")
    finally:
        server.phase = "ready"
    assert "type" not in http.post("/v1/messagesx", json={}).json()


def test_refusals_before_the_route() -> None:
    thread = ServerThread(ServeOptions(api_key=["secret"], max_request_bytes=10, disable_uvicorn_access_log=True))
    try:
        url = f"{thread.url}/v1/messages"
        _is_error(httpx.post(url, json={}), 401, "authentication_error")
        headers = {"x-api-key": "secret"}
        _is_error(httpx.post(url, json={"messages": HELLO}, headers=headers), 413, "request_too_large")
        loading = httpx.post(url, content=b'{"a":1}', headers=headers)
        _is_error(loading, 400, "invalid_request_error")
    finally:
        thread.close()


def test_an_engine_that_fails_is_no_empty_success(scripted: Scripted, scripted_client: Any) -> None:
    failure = EngineGenerateError("boom at /secret/path")
    scripted.llm.say(failure)
    body = {"messages": HELLO, "max_tokens": 5}
    for stream in (False, True):
        _is_error(httpx.post(f"{scripted.url}/v1/messages", json={**body, "stream": stream}), 500, "api_error")
    scripted.llm.say("Hel", failure)
    last = _events(scripted.url, {"messages": HELLO})[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and "secret" not in last["error"]["message"]
    with (
        pytest.raises(anthropic.APIStatusError),
        scripted_client.messages.stream(model="tiny", max_tokens=5, messages=HELLO) as stream,
    ):
        stream.get_final_message()
