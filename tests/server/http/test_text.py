"""Text to token ids and back, without running the model."""

from typing import Any

import httpx
import pytest

CHAT = {"messages": [{"role": "user", "content": "Hello world"}]}


def _tokenized(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    tokenized: dict[str, Any] = answer.json()
    assert tokenized["count"] == len(tokenized["tokens"]) and tokenized["max_model_len"] == 512
    return tokenized


def test_text_to_tokens_and_back(http: httpx.Client) -> None:
    bare = _tokenized(http, {"prompt": "Hello world", "add_special_tokens": False, "return_token_strs": True})
    special = _tokenized(http, {"prompt": "Hello world"})

    assert len(bare["token_strs"]) == bare["count"] and special["token_strs"] is None
    assert special["tokens"][-bare["count"] :] == bare["tokens"]
    assert http.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": "Hello world"}


def test_a_chat_is_what_would_run(http: httpx.Client) -> None:
    rendered = http.post("/v1/chat/completions/render", json=CHAT).json()

    assert _tokenized(http, CHAT)["tokens"] == rendered["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        (
            "/tokenize",
            {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
    ],
)
def test_errors_name_the_field(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    refused = http.post(path, json=body)

    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
