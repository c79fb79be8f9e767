"""Perplexity of a text under bfloat16 weights and under each quantisation, and the ratios.

The text is Python's own manual (`pydoc_data.topics`), so every machine with the same Python has it.
"""

import argparse
import json
import math
import os
from pydoc_data.topics import topics

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    options = parse_options()
    text = "\n".join(topics[name] for name in sorted(topics))[: options.bytes]
    reference = None
    for quantization in ("dequantize", *options.quantization):
        perplexity, count = measure(options.model, quantization, text, options.window)
        reference = reference or perplexity
        line = {"quantization": quantization, "tokens": count, "perplexity": round(perplexity, 4)}
        print(json.dumps(line | {"ratio": round(perplexity / reference, 5)}), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_perplexity", description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="short name, folder or .gguf file [%(default)s]")
    add("--quantization", nargs="+", default=["int8", "gguf"], metavar="NAME", help="beside bfloat16 [int8 gguf]")
    add("--bytes", type=int, default=20_000, metavar="N", help="of text [%(default)s]")
    add("--window", type=int, default=1024, metavar="N", help="tokens to a prompt [%(default)s]")
    return parser.parse_args()


def measure(model: str, quantization: str, text: str, window: int) -> tuple[float, int]:
    """Each window stands alone; its first token is given, not predicted. Returns the perplexity and its token count."""
    from corespan import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", quantization=quantization, max_model_len=window + 1)
    ids = llm.get_tokenizer().encode(text)
    prompts = [{"prompt_token_ids": ids[start : start + window]} for start in range(0, len(ids) - 1, window)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    logprobs = [
        entries[token_id].logprob
        for output in outputs
        for token_id, entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return math.exp(-sum(logprobs) / len(logprobs)), len(logprobs)


if __name__ == "__main__":
    main()
