"""A core without a model behind each client, for the tests of the bridge."""

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from bridge import Bridge

ABOUT_PROCESSES = {"cpus", "death", "descriptors", "interpreter", "shutdown", "start", "start_waits", "strangers"}
"""Files whose cores start as a user's program starts them."""


@pytest.fixture(autouse=True)
def cores_of_this_file(request: pytest.FixtureRequest) -> None:
    if request.path.stem.removeprefix("test_") in ABOUT_PROCESSES:
        request.getfixturevalue("real_cores")


@pytest.fixture(autouse=True)
def socket_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder for the test's sockets alone, which must be empty in the end."""
    root = tempfile.mkdtemp(prefix="t")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", root)
    yield root
    os.rmdir(root)


@pytest.fixture(params=["inproc", "sync_mp", "async_mp"])
def make_bridge(request: pytest.FixtureRequest, socket_root: str) -> Iterator[Any]:
    """Builds bridges of the current kind; all are shut down after the test."""
    yield from _maker(request.param)


@pytest.fixture(params=["sync_mp", "async_mp"])
def make_mp_bridge(request: pytest.FixtureRequest, socket_root: str) -> Iterator[Any]:
    yield from _maker(request.param)


def _maker(kind: str) -> Iterator[Any]:
    bridges: list[Bridge] = []

    def make(**options: Any) -> Bridge:
        bridges.append(Bridge(kind, **options))
        return bridges[-1]

    yield make
    for bridge in bridges:
        bridge.close()
