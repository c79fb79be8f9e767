"""What LoRA adapters cost: many streams over several adapters, against the same streams without.

One engine serves both in turn, so that a drifting machine counts against both; ratios are what to quote.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from safetensors.torch import save_file

from corespan import LLM, LoRARequest, SamplingParams
from corespan.core.lora.adapter import matrix_places
from corespan.core.models.registry import resolve_model_spec
from corespan.core.models.spec import ModelSpec

PROMPT_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name or folder [%(default)s]")
    parser.add_argument("--quantization", choices=["int8", "gguf"], help="of the weights [as the model comes]")
    parser.add_argument("--streams", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--adapters", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--rank", type=int, default=16, help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer [%(default)s]")
    parser.add_argument("--repeat", type=int, default=5, help="rounds [%(default)s]")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        quantization=options.quantization,
        max_model_len=1024,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=options.adapters,
        max_lora_rank=options.rank,
    )
    spec = resolve_model_spec(llm.model_config.hf_config)
    prompts = [
        {"prompt_token_ids": [(31 * stream + 7 * at) % spec.vocab_size for at in range(PROMPT_TOKENS)]}
        for stream in range(options.streams)
    ]
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        adapters = [write_adapter(Path(folder), spec, number, options.rank) for number in range(options.adapters)]
        each = [adapters[stream % len(adapters)] for stream in range(options.streams)]
        rates: list[list[float]] = [[], []]
        for round_number in range(options.repeat + 1):
            for which, lora_request in enumerate((None, each)):
                started = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)
                rates[which].append(options.streams * options.tokens / (time.perf_counter() - started))
            if round_number:
                print(f"without {rates[0][-1]:8.1f} tok/s   with adapters {rates[1][-1]:8.1f} tok/s", flush=True)
    ratios = [adapted / plain for plain, adapted in zip(rates[0][1:], rates[1][1:], strict=True)]
    print(f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def write_adapter(folder: Path, spec: ModelSpec, number: int, rank: int) -> LoRARequest:
    """Random small weights for every matrix."""
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, (_, (rows, columns)) in matrix_places(spec).items():
        prefix = f"base_model.model.model.layers.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.02
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.02
    own = folder / str(number)
    own.mkdir()
    save_file(tensors, own / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
    (own / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(str(number), number + 1, str(own))


if __name__ == "__main__":
    main()
