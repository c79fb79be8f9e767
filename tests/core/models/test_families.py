"""Every family against transformers, in float32: logits within 1e-4 and the same 64 greedy tokens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from step_driver import StepDriver, make_vllm_config
from tiny_models import VARIANTS, build_tiny_model

from corespan.core.attention.native import NativeAttentionBackend
from corespan.core.attention.torch_backend import TorchAttentionBackend
from corespan.core.kernels import library
from corespan.core.kernels.memory import as_tensor
from corespan.core.models.registry import resolve_model_spec
from corespan.core.runtime import cpu_torch
from corespan.core.scheduler.runner_messages import NewRequestData
from corespan.core.worker.worker import Worker
from corespan.protocol.resolved_sampling import ResolvedSampling

NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 15, 16, 33, 47, 70)
BACKENDS = {"torch": TorchAttentionBackend, "native": NativeAttentionBackend}


@dataclass
class Family:
    reference: Any
    worker: Worker
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, build_tiny_model(folder, request.param)


@pytest.fixture(scope="module", params=BACKENDS)
def family(request: pytest.FixtureRequest, variant: tuple[Path, Any]) -> Iterator[Family]:
    """The tiny model in transformers and in a worker with one of the attention backends."""
    folder, reference = variant
    hf_config = json.loads((folder / "config.json").read_text())
    backend = BACKENDS[request.param]
    if backend is NativeAttentionBackend:
        attention = resolve_model_spec(hf_config).layers[0].attention
        if not library.is_available() or NativeAttentionBackend.obstacle(attention, 16, torch.float32):
            pytest.skip("no native kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_torch, "get_attention_backend", lambda spec, size, dtype, device: backend(spec, size, dtype))
        worker = Worker(make_vllm_config(str(folder), hf_config))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, hf_config["vocab_size"], length).tolist() for length in PROMPT_LENGTHS]
    yield Family(reference, worker, prompts)


def reference_logits(family: Family, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = family.reference(torch.tensor([token_ids])).logits[0]
    return logits


@torch.inference_mode()
def engine_logits(
    family: Family, token_ids: list[int], chunks: list[int], block_ids: list[int], computed: int = 0
) -> torch.Tensor:
    """Logits of every position from `computed` on, computed chunk by chunk."""
    batch, runtime = family.worker.model_runner.batch, family.worker.runtime
    params = ResolvedSampling(temperature=0.0)
    by_group = [[block_id + 15 * group for block_id in block_ids] for group in range(len(runtime.kv_groups))]
    batch.add(NewRequestData(0, token_ids, len(token_ids), params, 0, by_group, computed))
    logits = []
    for chunk in chunks:
        inputs = batch.prepare(np.array([0]), np.array([chunk]))
        logits.append(as_tensor(runtime.logits(runtime.forward(inputs.token_ids, inputs.metadata))).clone())
    batch.remove(0)
    return torch.cat(logits)


def assert_greedy(family: Family, driver: StepDriver) -> None:
    """Each request's output is what transformers, given the same tokens before, finds most likely at every place."""
    for request in driver.requests.values():
        logits = reference_logits(family, request.token_ids[:-1])
        best = logits[request.num_prompt_tokens - 1 :].argmax(-1).tolist()
        assert request.output == best
        assert len(best) == NEW_TOKENS


@pytest.mark.parametrize("chunks", [[70], [1, 15, 16, 17, 21], [1] * 70], ids=["whole", "chunked", "token_by_token"])
def test_logits_equal_transformers_however_the_prompt_is_cut(family: Family, chunks: list[int]) -> None:
    prompt = family.prompts[-1]
    family.worker.initialize_kv_cache(1 + 15 * len(family.worker.kv_groups()))
    logits = engine_logits(family, prompt, chunks, block_ids=[3, 9, 1, 14, 7])
    torch.testing.assert_close(logits, reference_logits(family, prompt), atol=1e-4, rtol=0)


def test_logits_behind_a_prefix_hit_equal_transformers(family: Family) -> None:
    prompt = family.prompts[-1]
    family.worker.initialize_kv_cache(1 + 15 * len(family.worker.kv_groups()))
    engine_logits(family, prompt[:48] + [5, 6, 7], [51], block_ids=[2, 11, 4, 5])
    logits = engine_logits(family, prompt, [22], block_ids=[2, 11, 4, 6, 7], computed=48)
    torch.testing.assert_close(logits, reference_logits(family, prompt)[48:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1000, 13], ids=["whole", "chunked"])
def test_greedy_tokens_of_a_mixed_batch_equal_transformers(family: Family, chunk: int) -> None:
    """In chunks of 13 the short prompts decode while the long ones still prefill."""
    driver = StepDriver(family.worker)
    for index, prompt in enumerate(family.prompts):
        driver.add(str(index), prompt)
    driver.run(NEW_TOKENS, chunk)
    assert_greedy(family, driver)
    for req_id in list(driver.requests):
        driver.remove(req_id)
    driver.flush()


def test_greedy_tokens_behind_prefix_hits_equal_transformers(family: Family) -> None:
    """One request shares blocks computed before, another those that are written in the very step it enters."""
    driver = StepDriver(family.worker)
    prompt = family.prompts[-1]
    driver.add("first", prompt)
    driver.step({"first": 50})
    driver.add("later", prompt[:32] + [9, 8, 7], shared_with="first", num_shared_blocks=2)
    driver.add("source", family.prompts[3])
    driver.give_blocks(driver.requests["source"], 3)
    driver.add("same_step", family.prompts[3][:32] + [1], shared_with="source", num_shared_blocks=2)
    driver.run(NEW_TOKENS)
    assert_greedy(family, driver)
    for req_id in list(driver.requests):
        driver.remove(req_id)
    driver.flush()
