"""The real Gemma 3 270M from its GGUF: the ids and greedy tokens that transformers gives for the same weights, as
`scripts/check_gemma3 --record` wrote them down. That script compares far more, and takes minutes."""

import json
from pathlib import Path

import pytest
from step_driver import StepDriver, make_vllm_config
from tokenizers import Tokenizer

from corespan.core.kernels import library
from corespan.core.kernels.linear import MixedWeight
from corespan.core.worker.worker import Worker
from corespan.engine.model_files.model_source import ModelFiles, resolve_model

RECORD = json.loads(Path(__file__).with_name("gemma3_270m.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model_files() -> ModelFiles:
    """Fetched into the user's cache if it is not there, under the Gemma Terms of Use."""
    return resolve_model("gemma3-270m")


def test_ids_equal_transformers(model_files: ModelFiles) -> None:
    tokenizer = Tokenizer.from_file(str(Path(model_files.tokenizer_dir or "") / "tokenizer.json"))
    assert [tokenizer.encode(each["text"]).ids for each in RECORD] == [each["prompt"] for each in RECORD]


def test_float32_tokens_equal_transformers(model_files: ModelFiles) -> None:
    driver = StepDriver(Worker(make_vllm_config(model_files.path, model_files.hf_config)))
    for index, each in enumerate(RECORD):
        driver.add(str(index), each["prompt"])
    driver.run(len(RECORD[0]["tokens"]), chunk=7)
    assert [request.output for request in driver.requests.values()] == [each["tokens"] for each in RECORD]


@pytest.mark.skipif(not library.is_available(), reason="no native kernels")
def test_tokens_from_the_blocks_of_the_file_are_those_of_float32(model_files: ModelFiles) -> None:
    """A Q4_K_M: the kinds of block are Q4_K, Q5_0, Q6_K and Q8_0, some side by side in one product."""
    worker = Worker(make_vllm_config(model_files.path, model_files.hf_config, dtype="bfloat16"))
    weights = worker.runtime.weights
    assert weights is not None and weights.embedding is weights.head
    assert any(isinstance(layer.qkv, MixedWeight) for layer in weights.layers)
    driver = StepDriver(worker)
    for index, each in enumerate(RECORD):
        driver.add(str(index), each["prompt"])
    driver.run(len(RECORD[0]["tokens"]), chunk=7)
    agreeing = [
        request.output[:8] == each["tokens"][:8] for request, each in zip(driver.requests.values(), RECORD, strict=True)
    ]
    assert all(agreeing)
