"""What guards the server: keys on every route, limits on what a client sends, nothing secret told."""

import json
import logging
import re
from collections.abc import Iterator

import httpx
import pytest
from clients import SMALL_ENGINE
from deadlines import DEADLINE
from http_server import serve_engine

from corespan.server.http.app import ENDPOINTS, Endpoint
from corespan.server.http.middleware import MAX_HEADER_BYTES, MAX_HEADERS, OPEN_PATHS, Keys
from corespan.server.http.page import FILES
from corespan.server.serve_options import ServeOptions

KEY = "sk-a-secret-of-this-test"
OTHER_KEY = "sk-another-secret"
MAX_BYTES = 200_000
CALLS = [(endpoint, method) for endpoint in ENDPOINTS for method in endpoint.methods]


def _name(value: object) -> str | None:
    return value.path if isinstance(value, Endpoint) else None


@pytest.fixture(scope="module")
def guarded(tiny_llama_dir: str) -> Iterator[httpx.Client]:
    """A server with keys and a small limit."""
    options = ServeOptions(enable_admin=True, api_key=[KEY, OTHER_KEY], max_request_bytes=MAX_BYTES)
    thread = serve_engine(options, model=tiny_llama_dir, **SMALL_ENGINE)
    with httpx.Client(base_url=thread.url, timeout=DEADLINE) as client:
        yield client
    thread.close()


def _path(endpoint: Endpoint) -> str:
    return re.sub(r"{.*?}", "x", endpoint.path)


@pytest.mark.parametrize(("endpoint", "method"), CALLS, ids=_name)
def test_every_route_but_the_open_ones_needs_a_key(guarded: httpx.Client, endpoint: Endpoint, method: str) -> None:
    refused = []
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}, {"x-api-key": KEY[:-1]}):
        refused.append(guarded.request(method, _path(endpoint), headers=headers).status_code == 401)

    assert refused == [endpoint.path not in OPEN_PATHS] * 4


def test_open_routes_are_the_probes_and_the_page() -> None:
    assert OPEN_PATHS == {"/health", "/ping", "/live", "/version", "/metrics", "/metrics/", *FILES}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/tokenize", "/sleep", "/no/such/route"])
@pytest.mark.parametrize("variant", ["{}/", "/%2E{}", "{}/.", "{}%2F", "/health/..{}", "{}?x=/health"])
def test_no_spelling_of_a_path_gets_past_the_key(guarded: httpx.Client, path: str, variant: str) -> None:
    assert guarded.post(variant.format(path)).status_code == 401


@pytest.mark.parametrize("headers", [{"Authorization": f"bearer {OTHER_KEY}"}, {"x-api-key": KEY}])
def test_each_key_opens_by_either_header(guarded: httpx.Client, headers: dict[str, str]) -> None:
    assert guarded.get("/v1/models", headers=headers).status_code == 200


def test_every_key_is_compared_whole_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of comparisons, and what is compared, tell nothing of the keys: digests, all of them."""
    from corespan.server.http import middleware

    compared: list[tuple[bytes, bytes]] = []
    original = middleware.hmac.compare_digest

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return original(given, known)

    monkeypatch.setattr(middleware.hmac, "compare_digest", compare)
    for given in (KEY, OTHER_KEY, "", KEY[:3]):
        Keys([KEY, OTHER_KEY]).match([(b"x-api-key", given.encode())])

    assert len(compared) == 8
    assert {len(value) for pair in compared for value in pair} == {32}


def _complete(client: httpx.Client, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    sent = {"x-api-key": KEY, "Content-Type": "application/json", **headers}
    return client.post("/v1/completions", content=content, headers=sent)


def test_header_limits(guarded: httpx.Client) -> None:
    for headers in ({f"x-{n}": "1" for n in range(MAX_HEADERS + 1)}, {"x-long": "a" * MAX_HEADER_BYTES}):
        assert guarded.get("/v1/models", headers={"x-api-key": KEY, **headers}).status_code == 431


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(guarded: httpx.Client, chunked: bool) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a " * MAX_BYTES}).encode()
    pieces = (body[start : start + 60_000] for start in range(0, len(body), 60_000))
    headers = {"x-api-key": KEY, "Content-Type": "application/json"}

    answer = guarded.post("/v1/completions", content=pieces if chunked else body, headers=headers)

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("nest", ['{"model": "tiny", "prompt": "a", "vllm_xargs": {"a": %s}}', "%s"])
@pytest.mark.parametrize("bracket", ["[]", "{}"])
def test_deep_nesting_is_refused(guarded: httpx.Client, nest: str, bracket: str) -> None:
    depth = 20_000
    opening = "[" if bracket == "[]" else '{"a":'

    answer = _complete(guarded, nest % (opening * depth + "1" + bracket[1] * depth))

    assert answer.status_code == 400


def _nested_schema(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "constraint",
    [
        {"structured_outputs": {"regex": "(a{1000}){1000}"}},
        {"structured_outputs": {"regex": "(" * 20_000 + ")" * 20_000}},
        {"structured_outputs": {"regex": "(x+x+)+y"}},
        {"structured_outputs": {"json": _nested_schema(400)}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}},
        {"structured_outputs": {"json": {"type": "string", "pattern": "((a{500}){500}){500}"}}},
        {"structured_outputs": {"choice": ["word " + str(n) for n in range(5000)]}},
        {"structured_outputs": {"grammar": "start: start start | start"}},
        {"guided_regex": "[a-z]{1,100000}"},
    ],
    ids=lambda constraint: json.dumps(constraint)[:50],
)
def test_hard_constraint_is_bounded_and_holds_up_nobody(guarded: httpx.Client, constraint: dict[str, object]) -> None:
    """Answered or refused before the client gives up; the server and its engine serve others after."""
    answer = _complete(guarded, {"model": "tiny", "prompt": "a", "max_tokens": 4, **constraint})

    assert answer.status_code in (200, 400), answer.text
    assert "root:" not in answer.text
    assert _complete(guarded, {"model": "tiny", "prompt": "a", "max_tokens": 1}).status_code == 200


def test_client_templates_are_off_by_default(guarded: httpx.Client) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    headers = {"x-api-key": KEY}
    for extra in ({"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}):
        answer = guarded.post("/v1/chat/completions", json={**chat, **extra}, headers=headers)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template"


def test_nothing_secret_is_logged_or_measured(guarded: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in (KEY, OTHER_KEY, "sk-a-wrong-guess"):
            guarded.get("/v1/models?api_key=sk-in-the-query", headers={"Authorization": f"Bearer {key}"})
            guarded.get(f"/v1/models/{key}", headers={"x-api-key": KEY})
        _complete(guarded, {"model": "tiny", "prompt": "a private sentence", "cache_salt": "salt-of-mine"})
        _complete(guarded, {"model": "tiny", "prompt": "a private sentence", "temperature": "sk-not-a-number"})
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("corespan", "uvicorn.error"))]
    told = [*guarded.get("/metrics").text.splitlines(), *lines]

    assert any(record.name == "corespan.server" for record in caplog.records)
    secrets = (KEY, OTHER_KEY, "sk-a-wrong-guess", "sk-in-the-query", "sk-not", "private sentence", "salt-of-mine")
    assert not [line for line in told if any(word in line for word in secrets)]
