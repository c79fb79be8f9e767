"""Perplexity of a text under bfloat16 weights and under each quantisation, and the ratios; with --kinds, of
the model written anew in each kind of block, dequantised and not.

The text is Python's own manual (`pydoc_data.topics`), so every machine with the same Python has it.
"""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    options = parse_options()
    text = "\n".join(topics[name] for name in sorted(topics))[: options.bytes]
    if not options.kinds:
        compare(options.model, options.quantization, text, options.window)
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"blocks": kind}), flush=True)
            compare(requantised(options.model, kind, Path(folder)), ["gguf"], text, options.window)


def compare(model: str, quantizations: list[str], text: str, window: int) -> None:
    reference = None
    for quantization in ("dequantize", *quantizations):
        perplexity, count = measure(model, quantization, text, window)
        reference = reference or perplexity
        line = {"quantization": quantization, "tokens": count, "perplexity": round(perplexity, 4)}
        print(json.dumps(line | {"ratio": round(perplexity / reference, 5)}), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_perplexity", description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="short name, folder or .gguf file [%(default)s]")
    add("--quantization", nargs="+", default=["int8", "gguf"], metavar="NAME", help="beside bfloat16 [int8 gguf]")
    add(
        "--kinds",
        nargs="+",
        default=[],
        metavar="KIND",
        help="write the GGUF anew in each, such as Q4_K, and measure that",
    )
    add("--bytes", type=int, default=20_000, metavar="N", help="of text [%(default)s]")
    add("--window", type=int, default=1024, metavar="N", help="tokens to a prompt [%(default)s]")
    return parser.parse_args()


def requantised(model: str, kind: str, folder: Path) -> str:
    """A copy of the GGUF file with all matrices in one kind of block, or what stands in for it (see quantize.py)."""
    import gguf
    from quantize import fitting, quantize

    from corespan.engine.model_files.model_source import resolve_model

    reader = gguf.GGUFReader(resolve_model(model, with_tokenizer=False).path)
    architecture = reader.fields["general.architecture"].contents()
    path = folder / f"model.{kind}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            written = fitting(kind, values.shape[1])
            writer.add_tensor(tensor.name, quantize(values, written), raw_dtype=written)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


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
