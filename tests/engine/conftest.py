"""Fixtures shared by the tests of the shell: the tiny model's tokenizer and renderer, and `AsyncLLM`s."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from async_llm import build_async_llm
from text_pipeline import make_config
from tiny_llama import write_tokenizer

from corespan import AsyncLLM
from corespan.engine.text.loading import load_tokenizer
from corespan.engine.text.renderer import Renderer
from corespan.engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(str(folder))


@pytest.fixture
def renderer(tokenizer: Tokenizer) -> Renderer:
    return Renderer(make_config().model_config, tokenizer)


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: str) -> Iterator[AsyncLLM]:
    """Built outside any loop and used by every test from a loop of its own, one after the other."""
    engine = build_async_llm(tiny_llama_dir)
    yield engine
    engine.shutdown()


@pytest.fixture
def make_engine(tiny_llama_dir: str) -> Iterator[Callable[..., AsyncLLM]]:
    """Builds further ones, with other arguments; all are shut down after the test."""
    engines = []

    def make(**engine_args: Any) -> AsyncLLM:
        engines.append(build_async_llm(tiny_llama_dir, **engine_args))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
