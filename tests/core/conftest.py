"""A worker with a tiny random Llama, shared by the tests of models, runtimes and workers: remove what you add."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from step_driver import StepDriver, make_vllm_config
from tiny_models import build_tiny_model

from corespan.core.worker.worker import Worker


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Any]:
    """The folder, the config, and transformers' model."""
    folder = tmp_path_factory.mktemp("worker_llama")
    reference = build_tiny_model(folder, "llama")
    return folder, json.loads((folder / "config.json").read_text()), reference


@pytest.fixture(scope="session")
def worker(llama: tuple[Path, dict[str, Any], Any]) -> Worker:
    return Worker(make_vllm_config(str(llama[0]), llama[1]))


@pytest.fixture
def make_worker(llama: tuple[Path, dict[str, Any], Any]) -> Callable[..., Worker]:
    return lambda **options: Worker(make_vllm_config(str(llama[0]), llama[1], **options))


@pytest.fixture
def driver(worker: Worker) -> Iterator[StepDriver]:
    driver = StepDriver(worker)
    yield driver
    for req_id in list(driver.requests):
        driver.remove(req_id)
    driver.flush()
