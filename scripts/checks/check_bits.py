"""Answers of another revision and of the working tree to a fixed set of requests, compared bit for bit.

Tokens, finish reasons and log-probabilities, of the prompt too: greedy, seeded and shaped requests, alone and in a
batch, a prompt in chunks and drafts of n-grams, over every format of weights, with one thread and with two.
"""

import argparse
import json
import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SCRIPTS / "benchmarks"))

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"quantization": "dequantize"},
    "int8": {"quantization": "int8"},
    "gguf": {"quantization": "gguf"},
}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}}
ENGINES = {
    **{name: {"max_num_batched_tokens": 256, **options} for name, options in FORMATS.items()},
    "bf16, with drafts": DRAFTS,
}
THREADS = (1, 2)

TEXTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n    "]
FOX = "The quick brown fox jumps over the lazy dog. "
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 200)
SHAPED = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {77: 2.0}}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy with penalties": {"temperature": 0, **SHAPED},
    "seeded": {"temperature": 0.8, "seed": 3},
    "seeded, top-k and top-p": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "seed": 4, "n": 2},
    "seeded, min-p and penalties": {"temperature": 0.9, "min_p": 0.02, "seed": 5, "bad_words": [" the"], **SHAPED},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/check_bits", description=__doc__)
    parser.add_argument("revision", help="what git names a revision by")
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    options = parser.parse_args()
    from subjects import checkout

    differing = 0
    with checkout(options.revision) as folder:
        for engine in ENGINES:
            for threads in THREADS:
                theirs = answers(options.model, engine, threads, {"PYTHONPATH": folder})
                ours = answers(options.model, engine, threads, {})
                different = [name for name in theirs if ours[name] != theirs[name]]
                differing += len(different)
                print(
                    f"{engine}, {threads} threads: {len(theirs) - len(different)} of {len(theirs)} answers are the same"
                )
                for name in different:
                    print(f"  {name}: {difference(theirs[name], ours[name])}", flush=True)
    return 1 if differing else 0


def answers(model: str, engine: str, threads: int, environment: dict[str, str]) -> dict[str, Any]:
    """By name, as a process of its own gives them."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR", **environment}
    command = [sys.executable, __file__, "--answer", model, engine]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    places = {
        name: [place for place, pair in enumerate(zip_longest(theirs[name], ours[name])) if pair[0] != pair[1]]
        for name in theirs
    }
    return ", ".join(f"{name} from place {found[0]}" for name, found in places.items() if found)


def answer(model: str, engine: str) -> None:
    """Prints the answers of the `corespan` that is found first."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from corespan import LLM, SamplingParams

    shared = {"max_model_len": 1024, "max_num_seqs": 32, "disable_log_stats": True, "enable_prefix_caching": False}
    llm = LLM(model, **shared, **ENGINES[engine])
    found: dict[str, Any] = {}

    def ask(name: str, prompts: list[Any], sampling: dict[str, Any], max_tokens: int, **fields: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=3, **sampling, **fields)
        for number, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
            for each in output.outputs:
                found[f"{name}, prompt {number}, answer {each.index}"] = {
                    "tokens": list(each.token_ids),
                    "reason": [each.finish_reason],
                    "logprobs": figures(each.logprobs),
                    "prompt logprobs": figures(output.prompt_logprobs),
                }

    mixed = [{"prompt_token_ids": [5 + (7 * place + length) % 1000 for place in range(length)]} for length in LENGTHS]
    for name, sampling in SAMPLING.items():
        ask(f"{name}, alone", TEXTS[:1], sampling, 24)
        ask(f"{name}, batch", [*TEXTS, FOX * 6, *mixed], sampling, 16)
    ask("long prompt", [FOX * 60], SAMPLING["greedy"], 8, prompt_logprobs=1)
    print(json.dumps(found))
    llm.shutdown()


def figures(logprobs: Any) -> list[Any]:
    """Of each position, tokens with rank and log-probability."""
    return [
        sorted((token, each.rank, each.logprob) for token, each in (entry or {}).items()) for entry in logprobs or ()
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(*sys.argv[2:])
    else:
        sys.exit(main())
