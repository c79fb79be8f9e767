"""The native runtime in bfloat16: as near to float32 as the reference, and the same bits in any company."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from step_driver import StepDriver, make_vllm_config
from tiny_models import build_tiny_model

from corespan.core.kernels import library
from corespan.core.kernels.memory import as_tensor
from corespan.core.runtime.cpu_native import NativeRuntime
from corespan.core.runtime.cpu_torch import TorchRuntime
from corespan.core.scheduler.runner_messages import NewRequestData
from corespan.core.worker.worker import Worker
from corespan.protocol.params import SamplingParams
from corespan.protocol.resolved_sampling import ResolvedSampling

PROMPT_LENGTHS = (2, 15, 16, 33, 47, 70)
WHOLE = 10**9
VARIANTS = (
    "llama_tied_with_biases_and_llama3_rope",
    "llama_linear_rope_no_grouping",
    "mistral_with_window",
    "qwen3_three_heads_to_one",  # whose last queries share a panel of the packed weight with keys
    "qwen3_with_biases_and_layer_types",
    "gemma3",
)


@pytest.fixture(scope="module", params=VARIANTS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    build_tiny_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 320, length).tolist() for length in PROMPT_LENGTHS]


def make_worker(model_dir: Path, dtype: str, quantization: str | None = None) -> Worker:
    hf_config = json.loads((model_dir / "config.json").read_text())
    return Worker(make_vllm_config(str(model_dir), hf_config, dtype=dtype, quantization=quantization))


@pytest.fixture(scope="module")
def native(model_dir: Path) -> Worker:
    worker = make_worker(model_dir, "bfloat16")
    if not isinstance(worker.runtime, NativeRuntime):
        pytest.skip("no native kernels for bfloat16")
    return worker


def prompt_logprobs(worker: Worker, prompts: list[list[int]], chunk: int = WHOLE) -> list[np.ndarray]:
    """Each prompt's log-probabilities behind its first token, [length - 1] float32; all prompts in one batch."""
    driver = StepDriver(worker)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0))
    driver.run(4, chunk=chunk)
    logprobs = [np.concatenate([part.logprobs[:, 0] for part in r.prompt_logprobs]) for r in driver.requests.values()]
    for req_id in list(driver.requests):
        driver.remove(req_id)
    driver.flush()
    return logprobs


def test_native_bfloat16_is_as_near_to_float32_as_torch(
    native: Worker, model_dir: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = np.concatenate(prompt_logprobs(native, prompts))
    monkeypatch.setenv("CORESPAN_CPU_ISA", "none")
    plain, exact = make_worker(model_dir, "bfloat16"), make_worker(model_dir, "float32")
    assert isinstance(plain.runtime, TorchRuntime)
    truth = np.concatenate(prompt_logprobs(exact, prompts))
    torch_error = np.abs(np.concatenate(prompt_logprobs(plain, prompts)) - truth)
    error = np.abs(found - truth)
    assert error.mean() < 1.25 * torch_error.mean()
    assert np.quantile(error, 0.95) < 1.5 * np.quantile(torch_error, 0.95)


@pytest.mark.parametrize("chunk", [1, 7])
def test_native_logits_are_the_same_bits_in_chunks(native: Worker, prompts: list[list[int]], chunk: int) -> None:
    whole, chunked = prompt_logprobs(native, prompts), prompt_logprobs(native, prompts, chunk)
    for expected, found in zip(whole, chunked, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_native_logits_are_the_same_bits_alone(native: Worker, prompts: list[list[int]]) -> None:
    for expected, prompt in zip(prompt_logprobs(native, prompts), prompts, strict=True):
        np.testing.assert_array_equal(prompt_logprobs(native, [prompt])[0], expected)


@pytest.mark.parametrize(
    "rows",
    [[], [0, 1, 21, 54], [21, 0], [54, *range(22, 54)], [0, *range(2, 22)], [30, 7, 9]],
    ids=["none", "last_of_each", "last_of_some", "sampled_then_prompt", "all_of_some", "not_to_the_end"],
)
@torch.inference_mode()
def test_states_of_some_tokens_are_the_same_bits_as_those_of_all(native: Worker, rows: list[int]) -> None:
    native.initialize_kv_cache(100)
    runner, runtime, lengths = native.model_runner, native.runtime, [1, 1, 20, 33]
    tokens = np.random.default_rng(7).integers(0, 320, 33).tolist()
    for index, length in enumerate(lengths):
        blocks = [
            list(range(1 + 3 * index + 12 * group, 4 + 3 * index + 12 * group))
            for group in range(len(runtime.kv_groups))
        ]
        runner.batch.add(NewRequestData(index, tokens[:length], length, ResolvedSampling(), 0, blocks, 0))
    inputs = runner.batch.prepare(np.arange(4), np.array(lengths))

    def states(output_rows: torch.Tensor | None) -> torch.Tensor:
        metadata = tuple(map(replace, inputs.metadata))  # another step, as far as the model can tell
        return as_tensor(runtime.forward(inputs.token_ids, metadata, output_rows)).clone()

    every = states(None)
    assert isinstance(runtime, NativeRuntime)
    for cache in runtime.kv_caches:
        cache.fill(0)
    some = states(torch.tensor(rows, dtype=torch.int64))
    for row in range(4):
        runner.batch.remove(row)
    assert torch.equal(some, every[rows])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_native_logits_are_the_same_bits_in_steps_that_threads_share_out_by_rows(
    model_dir: Path, quantization: str | None
) -> None:
    worker = make_worker(model_dir, "bfloat16", quantization)
    if not isinstance(worker.runtime, NativeRuntime):
        pytest.skip("no native kernels for bfloat16")
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 320, length).tolist() for length in (200, 241, 240, 199, 231)]
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared_out = prompt_logprobs(worker, prompts)
        in_small_steps = prompt_logprobs(worker, prompts, chunk=13)
    finally:
        torch.set_num_threads(threads)
    for expected, found in zip(in_small_steps, shared_out, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("chunk", [1, 60])
def test_threads_that_come_late_to_their_work_change_no_bit(
    native: Worker, prompts: list[list[int]], chunk: int
) -> None:
    """More threads than cores: at any time most have no core, and find others further on when they get one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = prompt_logprobs(native, prompts, chunk)
        torch.set_num_threads(9)
        for _ in range(3):
            found = prompt_logprobs(native, prompts, chunk)
            for one, other in zip(expected, found, strict=True):
                np.testing.assert_array_equal(one, other)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantisation_without_kernels_to_run_it_is_said_to_be_slow(
    model_dir: Path, dtype: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "bfloat16":
        monkeypatch.setenv("CORESPAN_CPU_ISA", "none")
    with caplog.at_level("WARNING", logger="corespan.core"):
        make_worker(model_dir, dtype, "int8")
    assert "quantization is 'int8'" in caplog.text and "slow" in caplog.text


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_threads_wait_six_times_a_layer_where_few_tokens_are_computed(
    tmp_path: Path, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For norms and products, those of an MLP, and rotary and attention; eight times in bf16 and twelve in int8 where
    each norm and quantisation is one thread's work for all."""
    build_tiny_model(tmp_path, VARIANTS[0])
    worker = make_worker(tmp_path, "bfloat16", quantization)
    if not isinstance(worker.runtime, NativeRuntime):
        pytest.skip("no native kernels for bfloat16")
    run, num_syncs = library.Recording.run, []
    monkeypatch.setattr(library.Recording, "run", lambda *arguments: num_syncs.append(run(*arguments)))
    driver = StepDriver(worker)
    driver.add("a", list(range(100)))

    driver.step({"a": 99})
    many, num_syncs[:] = num_syncs[:1], []
    driver.step({"a": 1})

    embedding, last_layer, head, end = 1, 10, 1, 1  # the last layer has its queries apart
    assert num_syncs[:2] == [embedding + 2 * 6 + last_layer + end, head + end]
    per_layer, more_for_keys = (12, 2) if quantization else (8, 1)
    assert many == [embedding + 2 * per_layer + last_layer + more_for_keys + end]
