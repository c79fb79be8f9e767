"""Fixtures shared by all tests: a tiny random model, the small real one, and engines over each client."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import build_tiny_llama

# `clients` imports the engines; tests of the lower rooms run without them.

WITHOUT_PROCESSES = {"core", "protocol"}


DEAREST = {
    *("test_smollm2.py", "test_families.py", "test_determinism.py", "test_engine_controls.py", "test_hub.py"),
    *("test_restart_with_model.py", "test_restart.py", "test_programs.py", "test_death.py", "test_large_inputs.py"),
    *("test_rotary_settings.py", "test_scheduler_properties.py", "test_user_programs.py", "test_instruction_counts.py"),
}
"""These files take longest, so that they come first: the processes that share the files out end at about one time."""


os.environ["CORESPAN_PACKED_CACHE_GIB"] = "0"  # but in the tests of what is kept

for ignored in (signal.SIGINT, signal.SIGHUP):  # by a shell's background jobs, and by whatever such a job starts
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL if ignored == signal.SIGHUP else signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in DEAREST)


@pytest.fixture(scope="session", autouse=True)
def server_of_cores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has cores be forked, unless a test asks for `real_cores`."""
    rooms = {item.path.relative_to(Path(__file__).parent).parts[0] for item in request.session.items}
    if rooms <= WITHOUT_PROCESSES:
        yield
        return
    from forked_cores import forked_cores

    with forked_cores():
        yield


@pytest.fixture
def real_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has cores be started as a user's program starts them, for tests of just that."""
    monkeypatch.setattr("corespan.client.spawn.subprocess", subprocess)


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random float32 Llama as a Hugging Face folder: weights, config, tokenizer.json, generation_config."""
    return str(build_tiny_llama(tmp_path_factory.mktemp("tiny_llama")))


@pytest.fixture(scope="session")
def reference(tiny_llama_dir: str) -> Any:
    """transformers' float32 model of `tiny_llama_dir`."""
    from reference import Reference

    return Reference(tiny_llama_dir)


@pytest.fixture(scope="session")
def vlm_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random float32 SmolVLM, which takes pictures."""
    from tiny_vlm import build_tiny_vlm

    return str(build_tiny_vlm(tmp_path_factory.mktemp("tiny_vlm")))


@pytest.fixture(scope="session")
def vision_reference(vlm_dir: str) -> Any:
    """transformers' float32 model of `vlm_dir`."""
    from tiny_vlm import VisionReference

    return VisionReference(vlm_dir)


@pytest.fixture(scope="session")
def smollm2_gguf() -> str:
    """The path of SmolLM2-135M-Instruct in GGUF, fetched into the user's cache if it is not there."""
    from corespan.engine.model_files.model_source import resolve_model

    return str(Path(resolve_model("smollm2-135m").path))


@pytest.fixture(params=["inproc", "sync_mp", "async_mp"], scope="session")
def client_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def runners() -> Iterator[dict[str, Any]]:
    """Those that `runner` has built, by the kind of their client."""
    runners: dict[str, Any] = {}
    yield runners
    for runner in runners.values():
        runner.shutdown()


@pytest.fixture(scope="session")
def runner(client_kind: str, runners: dict[str, Any], tiny_llama_dir: str) -> Any:
    """The tiny model behind each client in turn, shared by every test of the session: leave nothing running."""
    from clients import SMALL_ENGINE, Runner

    if client_kind not in runners:
        runners[client_kind] = Runner(client_kind, model=tiny_llama_dir, **SMALL_ENGINE)
    return runners[client_kind]


@pytest.fixture
def make_runner(client_kind: str, tiny_llama_dir: str) -> Iterator[Callable[..., Any]]:
    """Builds further engines over the current client, with other arguments; all are shut down after the test."""
    from clients import SMALL_ENGINE, Runner

    runners = []

    def make(**engine_args: Any) -> Runner:
        runners.append(Runner(client_kind, **{"model": tiny_llama_dir, **SMALL_ENGINE, **engine_args}))
        return runners[-1]

    yield make
    for runner in runners:
        runner.shutdown()


@pytest.fixture
def make_llm(tiny_llama_dir: str) -> Iterator[Callable[..., Any]]:
    """Builds LLMs: the tiny model in process unless told otherwise; all are shut down after the test."""
    from clients import SMALL_ENGINE, multiprocessing_flag

    from corespan import LLM

    llms = []

    def make(*, multiprocess: bool = False, **engine_args: Any) -> LLM:
        with multiprocessing_flag(multiprocess):
            llms.append(LLM(**{"model": tiny_llama_dir, **SMALL_ENGINE, **engine_args}))
        return llms[-1]

    yield make
    for llm in llms:
        llm.shutdown()
