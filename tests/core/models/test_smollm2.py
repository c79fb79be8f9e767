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
    "Water boils at a temperature of",
    "The three primary colours are",
    "In 1969, the first human being",
    "Dear Sir or Madam,\n\nI am writing to",
    "Question: What is the largest planet in the solar system?\nAnswer:",
    "import numpy as np\n\nx = np.",
    "The recipe needs two eggs, a cup of flour and",
    "Photosynthesis is the process by which",
    "To be, or not to be, that is",
    "1, 2, 4, 8, 16, 32,",
    "My favourite season is autumn because",
    "SELECT name, age FROM people WHERE",
    "The difference between a virus and a bacterium is that",
    "She opened the old wooden door and saw",
    "Berlin is to Germany as Tokyo is to",
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
    """Prompts with their greedy continuations, all in one batch."""
    driver = StepDriver(Worker(make_vllm_config(model_files.path, model_files.hf_config, dtype=dtype)))
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt)
    driver.run(num_tokens, chunk=11)
    return [request.token_ids for request in driver.requests.values()]


@torch.inference_mode()
def num_agreeing(reference: Any, prompt: list[int], token_ids: list[int], steps: int = 0) -> int:
    """How many tokens behind the prompt, from the first, are those that transformers takes greedily.

    Where several logits share the first place, which rounding to bfloat16 brings about, each of them counts; so do
    those that lie up to `steps` steps of bfloat16 below it.
    """
    logits = reference(torch.tensor([token_ids[:-1]])).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(token_ids[len(prompt) :])[:, None]).squeeze(1)
    best = logits.amax(1)
    step = 2.0 ** (best.abs().log2().floor() - 7)
    return int((chosen >= best - steps * step).int().cumprod(0).sum())


def test_float32_tokens_equal_transformers(reference: Any, model_files: ModelFiles, prompts: list[list[int]]) -> None:
    texts = generate(model_files, "float32", prompts, 64)
    agreeing = [num_agreeing(reference, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    assert agreeing == [64] * len(prompts)


def test_bfloat16_tokens_agree_with_transformers(
    reference: Any, model_files: ModelFiles, prompts: list[list[int]]
) -> None:
    texts = generate(model_files, "bfloat16", prompts, 16)
    rounded = reference.to(torch.bfloat16)
    agreeing, nearly = (
        [num_agreeing(rounded, prompt, text, steps) for prompt, text in zip(prompts, texts, strict=True)]
        for steps in (0, 2)
    )
    in_hardware = not library.is_available() or library.ISA_LEVELS[library.isa_level()] == "avx512bf16"
    assert sum(count == 16 for count in agreeing) >= (18 if in_hardware else 17), agreeing
    assert nearly == [16] * len(prompts)
