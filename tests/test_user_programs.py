"""Programs around a real model: what they did before the engine, and where they hold it, changes nothing."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = str(Path(__file__).parent / "support")
PROMPT = "Once upon a time"
GENERATE = """
import multiprocessing
import sys

def generate(folder):
    from clients import SMALL_ENGINE
    from corespan import LLM, SamplingParams
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = LLM(folder, **SMALL_ENGINE).generate("Once upon a time", params, use_tqdm=False)
    return output.outputs[0].token_ids

def busy_torch():
    import torch
    torch.set_num_threads(4)
    matrix = torch.rand(1000, 1000)
    return float((matrix @ matrix).sum())

if __name__ == "__main__":
    folder = sys.argv[1]
"""
PROGRAMS = {
    "after torch": "    busy_torch()\n    print(generate(folder))\n",
    "forked worker": (
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n        print(pool.apply(generate, [folder]))\n"
    ),
    "worker forked after torch": (
        "    busy_torch()\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        print(pool.apply(generate, [folder]))\n"
    ),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_an_engine_works_after_torch_and_in_a_worker(
    tiny_llama_dir: str, reference: Any, make_llm: Any, tmp_path: Path, program: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(GENERATE + program)
    path = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

    done = subprocess.run(
        [sys.executable, str(script), tiny_llama_dir], env=environment, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    ids = make_llm().get_tokenizer().encode(PROMPT)
    assert ast.literal_eval(done.stdout) == reference.greedy(ids, 8, eos_token_id=None)
