"""POST /v1/completions, seen through the OpenAI client and plain HTTP."""

import json
from typing import Any

import httpx
import pytest


def _stream(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must end in [DONE]."""
    response = http.post("/v1/completions", json={**body, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


GREEDY = {"prompt": "Hello world", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def test_stream_joined_equals_whole(http: httpx.Client) -> None:
    body = {**GREEDY, "n": 1, "logprobs": 2, "echo": True, "return_token_ids": True}
    whole = http.post("/v1/completions", json=body).json()
    events = _stream(http, {**body, "stream_options": {"include_usage": True}})
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    choices = [event["choices"][0] for event in events]
    choice = whole["choices"][0]
    assert "".join(each["text"] for each in choices) == choice["text"]
    assert [token for each in choices for token in each["token_ids"]] == choice["token_ids"]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for each in choices for entry in each["logprobs"][key]] == choice["logprobs"][key], key
    assert choices[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_echo_scores_every_prompt_token_and_one_more(http: httpx.Client) -> None:
    """What evaluation harnesses take log-likelihoods from."""
    prompt = [5, 17, 30, 44]
    for _ in range(2):  # the second time the prompt is in the prefix cache
        body = {"prompt": [prompt], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
        logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        assert {key: len(values) for key, values in logprobs.items()} == dict.fromkeys(logprobs, len(prompt) + 1)
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        for position in range(1, len(prompt) + 1):
            token = logprobs["tokens"][position]
            assert logprobs["top_logprobs"][position][token] == logprobs["token_logprobs"][position]


def test_echo_without_output(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hello world", "max_tokens": 0, "echo": True}).json()
    assert answer["choices"][0]["text"] == "Hello world"
    assert answer["usage"]["completion_tokens"] == 0


def test_batches_of_prompts_and_answers_keep_their_order(http: httpx.Client) -> None:
    body = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 4, "seed": 7, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    streamed: dict[int, str] = {}
    for event in _stream(http, body):
        for choice in event["choices"]:
            streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert [streamed[index] for index in range(6)] == [choice["text"] for choice in answer["choices"]]


def test_openai_client(openai_client: Any) -> None:
    answer = openai_client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0)
    streamed = openai_client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == answer.choices[0].text


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [-1]}, 400, None),
        ({"prompt": [10**9]}, 400, "prompt_token_ids"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "temperature": "warm"}, 400, "temperature"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p"),
        ({"prompt": "x", "n": 0}, 400, "n"),
        ({"prompt": "x", "n": True}, 400, "n"),
        ({"prompt": "x", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "stop": [""]}, 400, "stop"),
        ({"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ({"prompt": "x", "best_of": 3}, 400, "best_of"),
        ({"prompt": "x", "guided_regex": "("}, 400, None),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
        ({"prompt": "hello " * 600}, 400, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_status_and_name_the_field(
    http: httpx.Client, body: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    response = http.post("/v1/completions", json={**body, "stream": stream})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("body", [b"[1]", b'"text"', b"{", b"", b"\xff", b'{"prompt": NaN}', b"[" * 20_000])
def test_bodies_that_are_no_object(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"]
