"""POST /v1/chat/completions without tools: forms, defaults, log-probabilities."""

from typing import Any

import httpx
import pytest
from http_server import ServerThread

from corespan.server.http.prompts import template_message
from corespan.server.http.schema import ChatMessage
from corespan.server.models import ChatSettings, resolve_parsers

MESSAGES = [{"role": "user", "content": "Hello world"}]


def test_stream_joined_equals_whole(openai_client: Any) -> None:
    request = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    whole = openai_client.chat.completions.create(**request)
    text, tokens, ids, usage = "", [], [], None
    for chunk in openai_client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        if not chunk.choices:
            usage = chunk.usage
            continue
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        ids += getattr(choice, "token_ids", None) or []
        tokens += choice.logprobs.content if choice.logprobs else []
    assert text == whole.choices[0].message.content
    assert tokens == whole.choices[0].logprobs.content
    assert ids == whole.choices[0].token_ids and len(ids) == 12
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"


def test_parts_of_text_are_joined(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    joined = {"messages": [{"role": "user", "content": "Hello\nworld"}]}
    rendered = [http.post("/v1/chat/completions/render", json=each).json() for each in (body, joined)]
    assert rendered[0] == rendered[1]


def test_rendered_prompt_is_the_one_that_runs(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    rendered = http.post("/v1/chat/completions/render", json=body).json()
    tokenized = http.post("/tokenize", json={"messages": MESSAGES}).json()
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"] == rendered["prompt_token_ids"] == tokenized["tokens"]
    assert answer["usage"]["prompt_tokens"] == tokenized["count"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ({"messages": MESSAGES, "audio": {"voice": "a"}}, "modalities"),
    ],
)
def test_errors_name_the_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_templates_find_content_in_a_message_of_calls_alone() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "pick", "arguments": "{}"}}

    spelled = template_message(ChatMessage(role="assistant", tool_calls=[call]))

    assert spelled == {"role": "assistant", "content": "", "tool_calls": [call]}


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}]


def test_tools_without_a_parser_are_refused_with_what_there_is_to_do(
    http: httpx.Client, tiny_server: ServerThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = tiny_server.server.models.loaded()
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2}
    refused = http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    assert "--enable-auto-tool-choice" in refused

    chosen = ChatSettings(enable_auto_tool_choice=True, tool_parser="auto", reasoning_parser="auto")
    with caplog.at_level("WARNING", logger="corespan.server"):
        monkeypatch.setattr(model, "chat", resolve_parsers(chosen, model.engine))

    assert "no tool call parser" in caplog.text and "--reasoning-parser NAME" in caplog.text
    refused = http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    assert "chat template tells none" in refused and "--tool-call-parser NAME" in refused
    assert http.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).status_code == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "pick"}}},
    ],
    ids=["schema", "required", "named"],
)
def test_json_ends_though_the_model_prefers_white_space(http: httpx.Client, asked: dict[str, Any]) -> None:
    (newline,) = http.post("/tokenize", json={"prompt": "\n", "add_special_tokens": False}).json()["tokens"]
    body = {"messages": MESSAGES, "max_tokens": 450, "temperature": 0, "logit_bias": {newline: 100}, **asked}

    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]

    assert choice["finish_reason"] in ("stop", "tool_calls")
