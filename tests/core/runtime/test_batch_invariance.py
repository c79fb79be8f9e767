"""`VLLM_BATCH_INVARIANT=1`: what cannot keep the promise is refused at the start; what starts keeps it, bit by bit."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from step_driver import StepDriver, make_vllm_config
from tiny_models import build_model, build_tiny_model

from corespan.core.kernels import library
from corespan.core.runtime.cpu_native import NativeRuntime
from corespan.core.worker.worker import Worker

PROMPT = [(13 * i) % 320 for i in range(47)]
OTHERS = [[(7 * i + n) % 320 for i in range(n)] for n in (1, 16, 33, 70, 5)]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build_tiny_model(folder, "llama")
    return folder


@pytest.fixture(autouse=True)
def promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


def make_worker(folder: Path, dtype: str = "bfloat16", quantization: str | None = None, block_size: int = 16) -> Worker:
    config = make_vllm_config(str(folder), json.loads((folder / "config.json").read_text()), dtype=dtype)
    replace = msgspec.structs.replace
    return Worker(
        replace(
            config,
            model_config=replace(config.model_config, quantization=quantization),
            cache_config=replace(config.cache_config, block_size=block_size),
        )
    )


needs_kernels = pytest.mark.skipif(not library.is_available(), reason="no native kernels")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_than_bfloat16_are_refused(model_dir: Path, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"VLLM_BATCH_INVARIANT=1 .*dtype is {dtype}.*use dtype='bfloat16'"):
        make_worker(model_dir, dtype)


def test_torch_alone_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORESPAN_CPU_ISA", "none")
    with pytest.raises(ValueError, match="native kernels are not built or switched off.*CORESPAN_CPU_ISA"):
        make_worker(model_dir)


@needs_kernels
def test_machines_with_amx_keep_the_native_kernels_and_the_promise(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for quantization in (None, "int8"):
        assert isinstance(make_worker(model_dir, quantization=quantization).runtime, NativeRuntime)


@needs_kernels
def test_blocks_and_shapes_that_no_kernel_takes_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_size is 8; use a multiple of 16"):
        make_worker(model_dir, block_size=8)
    build_model(tmp_path, "Llama", {"head_dim": 24})
    with pytest.raises(ValueError, match=r"head_dim 24.*multiple of 16"):
        make_worker(tmp_path)


def test_without_the_promise_they_start(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    make_worker(model_dir, "float32")


class LogitsDriver(StepDriver):
    """Keeps the logits from which each request's tokens were sampled."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.logits: dict[str, list[np.ndarray]] = {}

    def step(self, chunks):  # type: ignore[no-untyped-def]
        runtime, computed = self.worker.runtime, []
        compute = runtime.logits

        def keeping(hidden: Any) -> Any:
            logits = compute(hidden)
            computed.append(np.array(logits))
            return logits

        runtime.logits = keeping  # type: ignore[method-assign]
        try:
            output = super().step(chunks)
        finally:
            del runtime.logits
        for req_id, row in zip(output.req_ids, computed[0] if computed else (), strict=True):
            self.logits.setdefault(req_id, []).append(row)
        return output

    def end_all(self) -> None:
        for req_id in list(self.requests):
            self.remove(req_id)
        self.flush()


@pytest.fixture(scope="module", params=[None, "int8"], ids=["bfloat16", "int8"])
def worker(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Worker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        yield make_worker(model_dir, quantization=request.param)


def alone(driver: LogitsDriver) -> None:
    driver.add("probe", PROMPT)
    driver.run(NUM_TOKENS)


def in_a_batch(driver: LogitsDriver, chunk: int = 10**9) -> None:
    for index, prompt in enumerate(OTHERS):
        driver.add(f"before {index}", prompt)
    driver.run(2, chunk)
    driver.add("probe", PROMPT)
    driver.add("after", OTHERS[3])
    driver.run(NUM_TOKENS, chunk)


def chunked(driver: LogitsDriver) -> None:
    in_a_batch(driver, chunk=7)


def after_a_prefix_hit(driver: LogitsDriver) -> None:
    driver.add("first", PROMPT[:40] + OTHERS[1])
    driver.run(1)
    driver.add("probe", PROMPT, shared_with="first", num_shared_blocks=2)
    driver.run(NUM_TOKENS)


def after_preemption(driver: LogitsDriver) -> None:
    """Its blocks are lost after three tokens, and everything so far is computed again as one prompt."""
    driver.add("probe", PROMPT)
    driver.run(3)
    so_far = driver.requests["probe"].token_ids
    driver.remove("probe")
    driver.add("other", OTHERS[2])
    driver.run(1)
    driver.add("probe", so_far)
    driver.requests["probe"].num_prompt_tokens = len(PROMPT)
    driver.run(NUM_TOKENS)


@needs_kernels
@pytest.mark.parametrize("history", [in_a_batch, chunked, after_a_prefix_hit, after_preemption])
def test_logits_are_the_same_bits_whatever_happened(worker: Worker, history: Callable[[LogitsDriver], None]) -> None:
    expected, found = LogitsDriver(worker), LogitsDriver(worker)
    alone(expected)
    expected.end_all()
    history(found)
    found.end_all()
    np.testing.assert_array_equal(found.logits["probe"], expected.logits["probe"])
    assert len(expected.logits["probe"]) == NUM_TOKENS
