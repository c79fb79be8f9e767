"""An engine that is dropped without `shutdown()` takes its processes, its socket folder and its threads along."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from clients import SMALL_ENGINE, multiprocessing_flag
from leftovers import Leftovers

from corespan import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, StructuredOutputsParams

LONG_PROMPT = "x" * 400
PARAMS = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{4}"))


@pytest.fixture
def socket_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the test's sockets alone."""
    root = tmp_path / "s"
    root.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(root))
    return root


@pytest.mark.parametrize("multiprocess", [False, True], ids=["inproc", "sync_mp"])
def test_a_dropped_llm_leaves_nothing(tiny_llama_dir: str, socket_root: Path, multiprocess: bool) -> None:
    leftovers = Leftovers()
    with multiprocessing_flag(multiprocess):
        llm = LLM(tiny_llama_dir, **SMALL_ENGINE)
    (output,) = llm.generate(LONG_PROMPT, PARAMS, use_tqdm=False)
    assert len(output.outputs[0].text) == 4

    del llm
    gc.collect()

    assert leftovers.found() == []


@pytest.mark.parametrize("finished", [True, False], ids=["idle", "streaming"])
def test_a_dropped_async_llm_leaves_nothing(
    tiny_llama_dir: str, socket_root: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    monkeypatch.setattr("corespan.engine.async_llm.INLINE_PROMPT_LENGTH", 100)  # the prompt goes through a thread
    leftovers = Leftovers()

    async def use() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(tiny_llama_dir, **SMALL_ENGINE))
        stream: Any = engine.generate(LONG_PROMPT, PARAMS, "only")
        await anext(stream)
        if finished:
            _ = [output async for output in stream]

    asyncio.run(use())
    gc.collect()

    assert leftovers.found() == []
