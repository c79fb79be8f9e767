"""Pictures among the messages of a chat over HTTP."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from clients import SMALL_ENGINE
from deadlines import DEADLINE
from http_server import serve_engine
from tiny_vlm import VisionReference, picture

TEXT = "<|im_start|>user\nWhat is <image>?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def seeing(vlm_dir: str) -> Iterator[httpx.Client]:
    thread = serve_engine(None, ["seeing"], model=vlm_dir, **SMALL_ENGINE)
    with httpx.Client(base_url=thread.url, timeout=DEADLINE) as client:
        yield client
    thread.close()


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6, "temperature": 0, **fields}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def data_url() -> str:
    content = io.BytesIO()
    picture(70, 30).save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def test_a_chat_with_a_picture_is_answered(seeing: httpx.Client, vision_reference: VisionReference) -> None:
    request = body(text("What is "), image(data_url()), text("?"), return_token_ids=True, ignore_eos=True)
    answer = seeing.post("/v1/chat/completions", json=request).json()
    ids = vision_reference.inputs(TEXT, [picture(70, 30)])["input_ids"][0].tolist()
    assert answer["prompt_token_ids"] == ids[1:]
    assert answer["usage"]["prompt_tokens"] == len(ids) - 1
    assert len(answer["choices"][0]["token_ids"]) == 6


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("data:image/png;base64,AAAA", "a picture that can be read"),
        ("file:///etc/passwd", "allowed_local_media_path"),
        ("http://127.0.0.1/a.png", "public internet"),
        ("nothing", "an address that begins with"),
    ],
)
def test_a_picture_that_cannot_be_had_is_a_bad_request(seeing: httpx.Client, url: str, match: str) -> None:
    answer = seeing.post("/v1/chat/completions", json=body(text("What is "), image(url)))
    assert answer.status_code == 400
    assert match in answer.json()["error"]["message"]


def test_a_placeholder_in_a_text_is_no_picture(seeing: httpx.Client) -> None:
    answer = seeing.post("/v1/chat/completions", json=body(text("<image>"), image(data_url())))
    assert (answer.status_code, "2 placeholders" in answer.text) == (400, True)
