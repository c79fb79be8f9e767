"""For every form of request: the joined stream is the whole answer, in text, calls, reasons, usage, scores and ids."""

import json
from typing import Any

import httpx
import pytest
from deadlines import DEADLINE
from scripted_model import Scripted

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}]
SHORT = {"max_tokens": 10, "temperature": 0}
NAMED = {"type": "function", "function": {"name": "pick"}}

FORMS: dict[str, dict[str, Any]] = {
    "plain": SHORT,
    "length": {**SHORT, "ignore_eos": True},
    "two answers": {"max_tokens": 10, "n": 2, "seed": 7, "temperature": 1.0},
    "stop": {"max_tokens": 200, "temperature": 0, "stop": ["e", "a", "o", "t"]},
    "logprobs": {**SHORT, "logprobs": 2},
    "two answers with logprobs": {"max_tokens": 6, "n": 2, "seed": 7, "temperature": 1.0, "logprobs": 2},
    "json_schema": {
        "max_tokens": 300,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA}},
    },
    "json_schema cut off": {
        **SHORT,
        "response_format": {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA}},
    },
}


def _scored_as_chat(form: dict[str, Any]) -> dict[str, Any]:
    return form | {"logprobs": True, "top_logprobs": form["logprobs"]} if "logprobs" in form else form


COMPLETIONS = {
    **FORMS,
    "echo": {**SHORT, "echo": True},
    "echo with logprobs": {**SHORT, "echo": True, "logprobs": 1},
    "echo alone": {"max_tokens": 0, "echo": True, "logprobs": 1},
    "batch": {**SHORT, "prompt": ["one", "two and", "three"]},
    "batch of two answers": {"max_tokens": 5, "prompt": ["one", "two"], "n": 2, "seed": 3, "logprobs": 0},
}
CHATS = {
    **{name: _scored_as_chat(form) for name, form in FORMS.items()},
    "named tool": {"max_tokens": 300, "temperature": 0, "tools": TOOLS, "tool_choice": NAMED},
    "required tool cut off": {**SHORT, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required"},
    "no tool": {**SHORT, "tools": TOOLS, "tool_choice": "none"},
}


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200, response.text
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks[:-1]) and not chunks[-1]["choices"]
    return chunks


def _usage(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Without the cached tokens: the second request finds what the first one left."""
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]


def _joined_completion(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        for part in chunk["choices"]:
            choice = joined.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": {}, "ends": []})
            choice["text"] += part["text"]
            choice["token_ids"] += part["token_ids"]
            for key, values in (part["logprobs"] or {}).items():
                choice["logprobs"].setdefault(key, []).extend(values)
            if part["finish_reason"] is not None:
                choice["ends"].append((part["finish_reason"], part["stop_reason"]))
    return [joined[index] for index in sorted(joined)]


@pytest.mark.parametrize("form", COMPLETIONS)
def test_completion(http: httpx.Client, form: str) -> None:
    body = {"prompt": "Hello world", "return_token_ids": True, **COMPLETIONS[form]}
    whole = _post(http, "/v1/completions", body)
    chunks = _chunks(http, "/v1/completions", body)
    assert _joined_completion(chunks) == [
        {
            "text": choice["text"],
            "token_ids": choice["token_ids"],
            "logprobs": choice["logprobs"] or {},
            "ends": [(choice["finish_reason"], choice["stop_reason"])],
        }
        for choice in whole["choices"]
    ]
    assert _usage(chunks[-1]) == _usage(whole)


def _joined_chat(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        (part,) = chunk["choices"]
        delta = part["delta"]
        if part["index"] not in joined:
            assert delta.pop("role") == "assistant" and delta["content"] == ""
        assert "role" not in delta
        choice = joined.setdefault(
            part["index"], {"content": "", "reasoning": "", "calls": [], "token_ids": [], "logprobs": [], "ends": []}
        )
        choice["content"] += delta.get("content", "")
        choice["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                choice["calls"].append({"name": call["function"]["name"], "arguments": ""})
            assert call["index"] == len(choice["calls"]) - 1
            choice["calls"][-1]["arguments"] += call["function"]["arguments"]
        choice["token_ids"] += part.get("token_ids", [])
        choice["logprobs"] += (part["logprobs"] or {}).get("content", [])
        if part["finish_reason"] is not None:
            choice["ends"].append((part["finish_reason"], part["stop_reason"]))
    return [joined[index] for index in sorted(joined)]


def _whole_chat(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"].get("reasoning", ""),
            "calls": [call["function"] for call in choice["message"].get("tool_calls", ())],
            "token_ids": choice.get("token_ids", []),
            "logprobs": (choice["logprobs"] or {}).get("content", []),
            "ends": [(choice["finish_reason"], choice["stop_reason"])],
        }
        for choice in answer["choices"]
    ]


def _both_chats(http: httpx.Client, form: dict[str, Any]) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hello world"}], "return_token_ids": True, **form}
    whole = _post(http, "/v1/chat/completions", body)
    chunks = _chunks(http, "/v1/chat/completions", body)
    assert _joined_chat(chunks) == _whole_chat(whole)
    assert _usage(chunks[-1]) == _usage(whole)
    return whole


@pytest.mark.parametrize("form", CHATS)
def test_chat(http: httpx.Client, form: str) -> None:
    _both_chats(http, CHATS[form])


CALL = '<tool_call>{"name": "pick", "arguments": {"colour": "red"}}</tool_call>'
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
THOUGHT = "<think>hm</think>"

# what the model says, why the engine stopped, the request, (finish_reason, calls, content)
ENDS: list[tuple[list[str], str, dict[str, Any], tuple[str, int, str]]] = [
    (["Hel", "lo"], "stop", {}, ("stop", 0, "Hello")),
    (["Hel", "lo"], "repetition", {}, ("stop", 0, "Hello")),
    ([CALL[:30], CALL[30:]], "stop", {"tools": TOOLS}, ("tool_calls", 1, "")),
    ([CALL, "\n" + CALL], "stop", {"tools": TOOLS}, ("tool_calls", 2, "")),
    ([CALL, CALL], "stop", {"tools": TOOLS, "parallel_tool_calls": False}, ("tool_calls", 1, "")),
    ([CALL], "length", {"tools": TOOLS}, ("length", 1, "")),
    ([CALL[:50]], "length", {"tools": TOOLS}, ("length", 1, "")),
    (["no ", "call"], "stop", {"tools": TOOLS}, ("stop", 0, "no call")),
    ([CALL], "stop", {"tools": TOOLS, "tool_choice": "none"}, ("stop", 0, CALL)),
    (['[{"name": "pick", ', '"parameters": {}}]'], "stop", REQUIRED, ("tool_calls", 1, "")),
    (["nothing"], "stop", REQUIRED, ("stop", 0, "nothing")),
    (['{"colour":', ' "red"}'], "stop", {"tools": TOOLS, "tool_choice": NAMED}, ("stop", 1, "")),
    ([THOUGHT[:9], THOUGHT[9:] + "Yes"], "stop", {}, ("stop", 0, "Yes")),
    ([THOUGHT, CALL], "stop", {"tools": TOOLS, "n": 2, "temperature": 1.0}, ("tool_calls", 1, "")),
]


@pytest.mark.parametrize(("pieces", "reason", "form", "expected"), ENDS)
def test_how_chats_end(
    scripted: Scripted, pieces: list[str], reason: str, form: dict[str, Any], expected: tuple[str, int, str]
) -> None:
    scripted.llm.say(*pieces, finish_reason=reason, stop_reason="why" if reason == "repetition" else None)
    with httpx.Client(base_url=scripted.url, timeout=DEADLINE) as http:
        answer = _both_chats(http, form)
    for choice in answer["choices"]:
        message = choice["message"]
        calls = message.get("tool_calls", [])
        assert (choice["finish_reason"], len(calls), message["content"] or "") == expected
        assert calls or "tool_calls" not in message
        assert choice["stop_reason"] == ("why" if reason == "repetition" else None)


def test_hidden_reasoning_leaves_no_trace_but_its_count(scripted: Scripted) -> None:
    scripted.llm.say("<think>", "secret", "</think>", "Yes")
    with httpx.Client(base_url=scripted.url, timeout=DEADLINE) as http:
        shown = _both_chats(http, {})
        hidden = _both_chats(http, {"include_reasoning": False})
    (shown_choice,), (hidden_choice,) = shown["choices"], hidden["choices"]
    assert shown_choice["message"]["reasoning"] == shown_choice["message"]["reasoning_content"] == "secret"
    assert "secret" not in json.dumps(hidden) and hidden_choice["message"]["content"] == "Yes"
    assert "token_ids" not in hidden_choice and hidden_choice["logprobs"] is None
    assert _usage(hidden) == _usage(shown)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_priority_and_cache_salt_reach_the_engine(scripted: Scripted, path: str) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "cache_salt": "mine", "priority": 3}
    scripted.llm.say("ok")
    for headers, priority in (({}, 3), ({"X-Vllm-Priority": "-1"}, -1)):
        response = httpx.post(scripted.url + path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        settings = scripted.llm.requests[-1][1]
        assert (settings["priority"], settings["cache_salt"]) == (priority, "mine")
    refused = httpx.post(scripted.url + path, json={**body, "cache_salt": ""})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"
    refused = httpx.post(scripted.url + path, json=body, headers={"X-Vllm-Priority": "high"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
