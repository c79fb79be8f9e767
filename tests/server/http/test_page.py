"""The page: its files, what guards them, and that it asks no other host for anything."""

import re

import httpx
import pytest
from http_server import ServerThread

from corespan.server.http.page import FILES
from corespan.server.serve_options import ServeOptions

OUTWARD = re.compile(r"""(?:src|href|from|import|url\()\s*[=(]?\s*["']?(?:https?:)?//""")
MARKUP = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser")


@pytest.mark.parametrize("path", FILES)
def test_file_is_served_under_a_strict_policy(http: httpx.Client, path: str) -> None:
    answer = http.get(path)

    assert answer.status_code == 200
    assert answer.content == FILES[path].read_bytes()
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe" not in policy and "*" not in policy
    assert http.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    assert http.head(path).status_code == 200


@pytest.mark.parametrize("path", FILES)
def test_file_names_no_foreign_host_and_sets_no_markup(path: str) -> None:
    text = FILES[path].read_text(encoding="utf-8")

    assert not OUTWARD.search(text)
    assert not [word for word in MARKUP if word in text]


def test_files_name_only_files_that_are_served() -> None:
    for served, path in FILES.items():
        text = path.read_text(encoding="utf-8")
        named = [f"/{name}" for name in re.findall(r'(?:src|href)="(page/[^"]+)"', text)]
        named += [f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        assert set(named) <= FILES.keys(), served


@pytest.mark.parametrize("path", ["/page/", "/page/../page.py", "/page/%2e%2e/page.py", "/page/main.js/", "/page"])
def test_no_other_path_is_served(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_page_can_be_switched_off() -> None:
    thread = ServerThread(ServeOptions(disable_web_ui=True, disable_uvicorn_access_log=True))
    try:
        assert [httpx.get(thread.url + path).status_code for path in FILES] == [404] * len(FILES)
    finally:
        thread.close()
