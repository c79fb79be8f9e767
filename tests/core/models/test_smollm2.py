"""The real small model from its GGUF, against transformers loading the same file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from step_driver import StepDriver, make_vllm_config
from tokenizers import Tokenizer

from corespan.core.kernels import library
from corespan.core.worker.worker import Worker
from corespan.engine.model_files.model_source import ModelFiles, resolve_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "In 1969, the first human being",
    "Dear Sir or Madam,\n\nI am writing to",
    "Question: What is the largest planet in the solar system?\nAnswer:",
    "1, 2, 4, 8, 16, 32,",
    "SELECT name, age FROM people WHERE",
    "The quick brown fox jumps over the lazy dog. The lazy dog",
    "Step 1: Gather all the materials.\nStep 2:",
]


@pytest.fixture(scope="module")
def model_files(smollm2_gguf: str) -> ModelFiles:
    return resolve_model(smollm2_gguf)


@pytest.fixture(scope="module")
def prompts(model_files: ModelFiles) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(Path(model_files.tokenizer_dir or "") / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def reference(smollm2_gguf: str) -> Iterator[Any]:
    """transformers' model, float32."""
    from transformers import AutoModelForCausalLM

    path = Path(smollm2_gguf)
    yield AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def generate(model_files: ModelFiles, dtype: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Prompts with their greedy continuations, all in one batch, with the weights in `dtype`."""
    config = make_vllm_config(model_files.path, model_files.hf_config, dtype=dtype, quantization="dequantize")
    driver = StepDriver(Worker(config))
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt)
    driver.run(num_tokens, chunk=11)
    return [request.token_ids for request in driver.requests.values()]


@torch.inference_mode()
def logits_of(reference: Any, prompts: list[list[int]], texts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' for every token behind each prompt, float32, all texts in one batch."""
    longest = max(map(len, texts))
    logits = reference(torch.tensor([text + [0] * (longest - len(text)) for text in texts])).logits
    pairs = zip(prompts, texts, strict=True)
    return [logits[row, len(prompt) - 1 : len(text) - 1].float() for row, (prompt, text) in enumerate(pairs)]


def num_agreeing(logits: torch.Tensor, token_ids: list[int], steps: int = 0) -> int:
    """How many tokens, from the first, are those that transformers takes greedily.

    Where several logits share the first place, which rounding to bfloat16 brings about, each of them counts; so do
    those that lie up to `steps` steps of bfloat16 below it.
    """
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None]).squeeze(1)
    best = logits.amax(1)
    step = 2.0 ** (best.abs().log2().floor() - 7)
    return int((chosen >= best - steps * step).int().cumprod(0).sum())


def test_float32_tokens_equal_transformers(reference: Any, model_files: ModelFiles, prompts: list[list[int]]) -> None:
    texts = generate(model_files, "float32", prompts, 64)
    logits = logits_of(reference, prompts, texts)
    agreeing = [num_agreeing(each, text[-64:]) for each, text in zip(logits, texts, strict=True)]
    assert agreeing == [64] * len(prompts)


def test_bfloat16_tokens_agree_with_transformers(
    reference: Any, model_files: ModelFiles, prompts: list[list[int]]
) -> None:
    texts = generate(model_files, "bfloat16", prompts, 16)
    logits = logits_of(reference.to(torch.bfloat16), prompts, texts)
    agreeing, nearly = (
        [num_agreeing(each, text[-16:], steps) for each, text in zip(logits, texts, strict=True)] for steps in (0, 2)
    )
    in_hardware = not library.is_available() or library.ISA_LEVELS[library.isa_level()] == "avx512bf16"
    assert sum(count == 16 for count in agreeing) >= (9 if in_hardware else 8), agreeing
    assert nearly == [16] * len(prompts)
