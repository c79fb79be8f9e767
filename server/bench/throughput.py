"""Measures how many requests and tokens a second the engine answers when it has them all at once, without a server."""

import argparse
import time
from typing import Any

from . import datasets, offline

SUMMARY = "the engine on many requests at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    datasets.add_arguments(parser, input_len=1024, num_prompts=1000)
    offline.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Raises ValueError for options that make no sense, OSError for files."""
    samples = datasets.samples_of(options, options.seed or 0)
    with offline.running_llm(options) as llm:
        result = _measure(llm, options, samples)
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {result['total_num_prompt_tokens']}")
    print(f"Total num output tokens:  {result['total_num_output_tokens']}")
    offline.save(options, result)
    return 0


def _measure(llm: Any, options: argparse.Namespace, samples: list[datasets.Sample]) -> dict[str, Any]:
    """vLLM's result fields, and its printed ones."""
    prompts = [{"prompt_token_ids": each.prompt} if isinstance(each.prompt, list) else each.prompt for each in samples]
    params = [offline.params_of(options, each.output_len) for each in samples]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - began
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_prompt + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        "total_num_prompt_tokens": num_prompt,
        "total_num_output_tokens": num_output,
    }
