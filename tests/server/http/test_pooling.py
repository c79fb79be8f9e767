"""The routes for models that pool, by OpenAI's client and bare: what they give is what the engine gives."""

import base64
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from clients import SMALL_ENGINE
from deadlines import DEADLINE
from http_server import ServerThread, serve_engine
from pooling_models import build_pooling_model

from corespan import LLM

TEXTS = ["The quick brown fox", "Paris", "Rivers run through both"]


def unit(vector: Any) -> Any:
    return np.array(vector) / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    def folder(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    return {
        "embeds": build_pooling_model(folder("embeds")),
        "classes": build_pooling_model(folder("classes"), kind="ForSequenceClassification", num_labels=3),
        "scores": build_pooling_model(folder("scores"), kind="ForSequenceClassification", num_labels=1),
    }


@pytest.fixture(scope="module")
def servers(folders: dict[str, str]) -> Iterator[dict[str, ServerThread]]:
    options = {"hf_overrides": {"is_matryoshka": True}, **SMALL_ENGINE}
    threads = {name: serve_engine(names=[name], model=folder, **options) for name, folder in folders.items()}
    yield threads
    for thread in threads.values():
        thread.close()


@pytest.fixture(scope="module")
def post(servers: dict[str, ServerThread]) -> Any:
    def call(name: str, path: str, expect: int = 200, **body: Any) -> Any:
        answer = httpx.post(servers[name].url + path, json=body, timeout=DEADLINE)
        assert answer.status_code == expect, answer.text
        return answer.json()

    return call


@pytest.fixture(scope="module")
def vectors(folders: dict[str, str]) -> Iterator[list[list[float]]]:
    llm = LLM(folders["embeds"], **SMALL_ENGINE)
    yield [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    llm.shutdown()


def test_openais_client_gets_the_engines_vectors(servers: dict[str, ServerThread], vectors: list[list[float]]) -> None:
    client = openai.OpenAI(base_url=f"{servers['embeds'].url}/v1", api_key="EMPTY", max_retries=0)
    for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="embeds", input=TEXTS, **encoding)  # type: ignore[arg-type]
        assert [each.index for each in answer.data] == [0, 1, 2]
        for each, wanted in zip(answer.data, vectors, strict=True):
            got = each.embedding
            if isinstance(got, str):
                got = np.frombuffer(base64.b64decode(got), dtype="<f4").tolist()
            assert got == pytest.approx(wanted, abs=1e-7)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    short = client.embeddings.create(model="embeds", input="Paris", dimensions=8).data[0].embedding
    np.testing.assert_allclose(short, unit(vectors[1][:8]), atol=1e-6)


def test_inputs_come_as_texts_token_ids_and_messages(post: Any, servers: dict[str, ServerThread]) -> None:
    tokenizer = servers["embeds"].server.models.loaded()[0].tokenizer
    ids = [tokenizer.encode(text) for text in TEXTS]
    texts = post("embeds", "/v1/embeddings", input=TEXTS)
    assert texts["object"] == "list" and texts["model"] == "embeds" and texts["id"].startswith("embd-")
    assert texts["data"][0]["object"] == "embedding"
    assert post("embeds", "/v1/embeddings", input=ids)["data"] == texts["data"]
    assert post("embeds", "/v1/embeddings", input=ids[1])["data"][0]["embedding"] == texts["data"][1]["embedding"]
    chat = post("embeds", "/v1/embeddings", messages=[{"role": "user", "content": "Paris"}])
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Paris"}], tokenize=False)
    plain = post("embeds", "/v1/embeddings", input=tokenizer.encode(text, add_special_tokens=False))
    assert chat["data"] == plain["data"]
    cut = post("embeds", "/v1/embeddings", input=TEXTS[2], truncate_prompt_tokens=2)
    assert cut["usage"]["prompt_tokens"] == 2
    assert cut["data"] == post("embeds", "/v1/embeddings", input=ids[2][:2])["data"], "the beginning is kept"
    left = post("embeds", "/v1/embeddings", input=TEXTS[2], truncate_prompt_tokens=3, truncation_side="left")
    assert left["data"] == post("embeds", "/v1/embeddings", input=[ids[2][0], *ids[2][-2:]])["data"]


def test_base64_is_of_the_wanted_type_and_order(post: Any, vectors: list[list[float]]) -> None:
    for dtype, endianness in (("float32", "big"), ("float16", "little")):
        encoding = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
        (entry,) = post("embeds", "/v1/embeddings", input=TEXTS[0], **encoding)["data"]
        vector = np.frombuffer(base64.b64decode(entry["embedding"]), np.dtype(dtype).newbyteorder(endianness))
        np.testing.assert_allclose(vector, vectors[0], atol=1e-3)


def test_the_servers_template_joins_a_pair_and_the_document_is_cut(post: Any, servers: dict[str, ServerThread]) -> None:
    model = servers["scores"].server.models.loaded()[0]
    chat, template = model.chat, "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}!"
    model.chat = dataclasses.replace(chat, chat_template=template)
    try:
        for document, options in (("France", {}), ("fox " * 60, {"truncate_prompt_tokens": 40})):
            answer = post("scores", "/score", text_1="Paris", text_2=document, **options)
            used = answer["usage"]["prompt_tokens"]
            lengths = range(len(document) + 1)
            texts = (f"<query>Paris\n<document>{document[:length]}\n!" for length in lengths)
            found = [text for text in texts if len(model.tokenizer.encode(text)) == used]
            scores = [post("scores", "/classify", input=text)["data"][0]["probs"][0] for text in found]
            assert answer["data"][0]["score"] in scores
        assert 35 < used <= 40
    finally:
        model.chat = chat


def test_pooling_gives_what_is_asked_for(post: Any, vectors: list[list[float]]) -> None:
    whole = post("embeds", "/pooling", input=TEXTS)
    assert [each["object"] for each in whole["data"]] == ["pooling"] * 3
    np.testing.assert_allclose([each["data"] for each in whole["data"]], vectors, atol=1e-7)
    (tokens,) = post("embeds", "/pooling", input=TEXTS[0], task="token_embed")["data"]
    np.testing.assert_allclose(tokens["data"][-1], vectors[0], atol=1e-6)
    assert np.array(post("classes", "/pooling", input="a")["data"][0]["data"]).shape == (3,)


def test_classes_have_names_and_probabilities(post: Any) -> None:
    answer = post("classes", "/classify", input=TEXTS)
    for each in answer["data"]:
        assert sum(each["probs"]) == pytest.approx(1.0) and each["num_classes"] == 3
        assert each["label"] == f"LABEL_{int(np.argmax(each['probs']))}"
    bare = post("classes", "/classify", input=TEXTS[0], use_activation=False)["data"][0]["probs"]
    np.testing.assert_allclose(np.exp(bare) / np.exp(bare).sum(), answer["data"][0]["probs"], atol=1e-6)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
def test_scores_go_by_each_of_the_names(post: Any, vectors: list[list[float]], names: tuple[str, str]) -> None:
    answer = post("embeds", "/v1/score", **{names[0]: TEXTS[0], names[1]: TEXTS})
    assert [each["score"] for each in answer["data"]] == pytest.approx(np.dot(vectors, vectors[0]), abs=1e-5)
    assert answer["data"][0]["object"] == "score"
    assert len(post("scores", "/score", **{names[0]: TEXTS, names[1]: TEXTS})["data"]) == 3


def test_documents_are_ranked(post: Any) -> None:
    scores = [each["score"] for each in post("scores", "/score", text_1="sea", text_2=TEXTS)["data"]]
    ranked = post("scores", "/v2/rerank", query="sea", documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]])["results"]
    assert [each["index"] for each in ranked] == sorted(range(3), key=lambda index: -scores[index])
    assert [each["relevance_score"] for each in ranked] == sorted(scores, reverse=True)
    assert ranked[0]["document"] == {"text": TEXTS[ranked[0]["index"]]}
    (best,) = post("embeds", "/rerank", query=TEXTS[1], documents=TEXTS, top_n=1, return_documents=False)["results"]
    assert best["index"] == 1 and "document" not in best


@pytest.mark.parametrize(
    ("name", "path", "body", "param", "reason"),
    [
        ("embeds", "/v1/embeddings", {}, "input", "give either input or messages"),
        ("embeds", "/v1/embeddings", {"input": []}, "input", "input is empty"),
        ("embeds", "/v1/embeddings", {"input": ["a"] * 2049}, "input", "at most 2048"),
        ("embeds", "/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name", "name no prompts"),
        ("embeds", "/v1/embeddings", {"input": "a", "embed_dtype": "fp8"}, "embed_dtype", "Invalid enum value 'fp8'"),
        ("embeds", "/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048"),
        ("embeds", "/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "at most 2048"),
        ("embeds", "/v1/embeddings", {"input": ["a", ""]}, "input.1", "input.1 is empty"),
        ("embeds", "/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ("embeds", "/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "in 1..64"),
        ("embeds", "/v1/embeddings", {"input": [5] * 600}, "messages", "it may have at most 512"),
        ("embeds", "/v1/embeddings", {"input": [600]}, "prompt_token_ids", "ids are 0..511"),
        ("embeds", "/pooling", {"input": "a", "task": "classify"}, "task", "one of embed, token_embed"),
        ("embeds", "/classify", {"input": "a"}, "model", "does not support the classification API: it embeds"),
        ("classes", "/v1/embeddings", {"input": "a"}, "model", "does not support the embeddings API: it classifies"),
        ("classes", "/score", {"text_1": "a", "text_2": "b"}, None, "this one has 3"),
        ("embeds", "/score", {"text_1": "a"}, "text_2", "give two sides"),
        ("embeds", "/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, None, "as many"),
        ("embeds", "/rerank", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("embeds", "/rerank", {"query": "a", "documents": [{"image": 1}]}, "documents.0", "must be a text"),
        ("embeds", "/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
        ("embeds", "/v1/completions", {"prompt": "a"}, "model", "'embeds' does not generate text"),
        ("embeds", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model", "not generate"),
    ],
)
def test_what_cannot_be_served_says_why(
    post: Any, name: str, path: str, body: dict[str, Any], param: str | None, reason: str
) -> None:
    error = post(name, path, 400, model=name, **body)["error"]
    assert reason in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
        *((path, {"text_1": "a", "text_2": "b"}) for path in ("/score", "/v1/score")),
        *((path, {"query": "a", "documents": ["b"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    ],
)
def test_a_model_that_generates_says_so(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused = http.post(path, json={"model": "tiny", **body})
    assert refused.status_code == 400
    assert "'tiny' does not support the" in refused.json()["error"]["message"]
    assert "it generates text" in refused.json()["error"]["message"]
    assert http.post(path, json={"model": "other", **body}).status_code == 404
