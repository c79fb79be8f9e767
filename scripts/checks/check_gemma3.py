"""The real Gemma 3 270M against transformers, which reads the same file: ids and texts of its tokenizer on awkward
texts, and 64 greedy tokens of each prompt, in float32 exactly and in bfloat16 nearly. One prompt exceeds the window.

`--record` writes what transformers gives for the first prompts to where the test of the model reads it. Takes some five
minutes and 4 GB.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from awkward_texts import random_texts  # noqa: E402  from the tests

from corespan import LLM, SamplingParams  # noqa: E402
from corespan.engine.model_files.model_source import resolve_model  # noqa: E402
from corespan.engine.text.loading import load_tokenizer  # noqa: E402

MODEL = "gemma3-270m"
RECORD = ROOT / "tests" / "core" / "models" / "gemma3_270m.json"
NUM_RECORDED, NUM_RECORDED_TOKENS = 4, 16
NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 4, 8, 16, 32,",
    "Le chat est assis sur  le tapis.\n\nThe cat",
    "Once upon a time, in a small village by the sea,",
    "The difference between a virus and a bacterium is that",
    "SELECT name, age FROM people WHERE",
    "東京は日本の",
    "Question: What is the largest planet in the solar system?\nAnswer:",
    "A list of words, again and again: " + "apple, pear, plum, cherry, " * 130,
]


def greedy(dtype: str, prompts: list[list[int]]) -> list[list[int]]:
    llm = LLM(MODEL, dtype=dtype, quantization="dequantize", max_model_len=2048, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.inference_mode()
def num_agreeing(reference: Any, prompt: list[int], tokens: list[int]) -> tuple[int, int]:
    """How many tokens, from the first, transformers finds the likeliest behind those before them; and how many are
    within four steps of bfloat16 of that."""
    logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    best = logits.amax(1)
    step = 2.0 ** (best.abs().log2().floor() - 7)
    exactly, nearly = (int((chosen >= best - margin).int().cumprod(0).sum()) for margin in (0.0, 4 * step))
    return exactly, nearly


def check_tokenizer(path: Path, folder: str) -> Any:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in [*PROMPTS, *random_texts(2000), "<start_of_turn>user\nHi  there<end_of_turn>\n<s><b>▁▁"]:
        assert ours.encode(text) == theirs(text)["input_ids"], repr(text)
    rng = np.random.default_rng(0)
    for _ in range(500):
        ids = rng.integers(0, len(ours), size=12).tolist()
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), ids
    assert ours.all_special_ids == theirs.all_special_ids
    print("the tokenizer equals transformers' on 2000 texts and 500 lists of ids")
    return ours


def write_record(prompts: list[list[int]], found: list[list[int]]) -> None:
    """Of the first prompts; what is found here is the reference's too, or the check fails."""
    entries = [
        {"text": text, "prompt": prompt, "tokens": tokens[:NUM_RECORDED_TOKENS]}
        for text, prompt, tokens in zip(PROMPTS[:NUM_RECORDED], prompts, found, strict=False)
    ]
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    RECORD.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> int:
    from transformers import AutoModelForCausalLM

    files = resolve_model(MODEL)
    path = Path(files.path)
    tokenizer = check_tokenizer(path, files.tokenizer_dir or "")
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    faults = 0
    for dtype in ("float32", "bfloat16"):
        found = greedy(dtype, prompts)
        if dtype == "float32" and "--record" in sys.argv:
            write_record(prompts, found)
        agreeing = [num_agreeing(reference, prompt, tokens) for prompt, tokens in zip(prompts, found, strict=True)]
        exactly, nearly = map(list, zip(*agreeing, strict=True))
        print(f"{dtype}: of {NEW_TOKENS} tokens {exactly} agree exactly, {nearly} nearly", flush=True)
        faults += sum(count < NEW_TOKENS for count in (exactly if dtype == "float32" else nearly))
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
