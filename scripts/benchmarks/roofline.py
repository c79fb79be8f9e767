"""What the machine allows for a model of these shapes: memory reads, packed bf16 products. roofline.py MODEL

Prints one JSON line: the measured rates, and the workloads' limits that follow from them.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
from workloads import WORKLOADS

from corespan.core.models.linear import PackedLinear
from corespan.engine.model_source import resolve_model

GEMM_ROWS = 2048  # tokens of one prefill step


def best_seconds(work: Callable[[], object], least: float = 1.0) -> float:
    """The shortest of as many runs as fit in `least` seconds."""
    work()
    shortest, total = float("inf"), 0.0
    while total < least:
        began = time.perf_counter()
        work()
        spent = time.perf_counter() - began
        shortest = min(shortest, spent)
        total += spent
    return shortest


def read_bytes_per_second() -> float:
    """A sum over 1 GiB of float32, far beyond the caches."""
    buffer = torch.ones(2**28)
    return buffer.nbytes / best_seconds(buffer.sum)


def linear_shapes(config: dict) -> list[tuple[int, int]]:
    """(rows out, columns in) of one layer's linear operations, merged as the engine merges them."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    intermediate = config["intermediate_size"]
    return [
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    ]


def layer_seconds(shapes: list[tuple[int, int]]) -> float:
    """Seconds for one layer's linear operations on GEMM_ROWS rows, weights packed by oneDNN."""
    total = 0.0
    for out, width in shapes:
        linear = PackedLinear(torch.randn(out, width).bfloat16(), None)
        rows = torch.randn(GEMM_ROWS, width).bfloat16()
        total += best_seconds(lambda rows=rows, linear=linear: linear(rows))
    return total


def main() -> None:
    config = resolve_model(sys.argv[1], with_tokenizer=False).hf_config
    shapes = linear_shapes(config)
    layers, hidden, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    layer_weights = sum(out * width for out, width in shapes)
    with torch.inference_mode():
        reads = read_bytes_per_second()
        seconds = layer_seconds(shapes)
    weight_bytes = 2 * (layers * layer_weights + vocab * hidden)
    print(
        json.dumps(
            {
                "engine": "machine's limit",
                "memory_read_GB_s": round(reads / 1e9, 1),
                "packed_gemm_GFLOP_s": round(2 * GEMM_ROWS * layer_weights / seconds / 1e9),
                "bf16_weight_MB": round(weight_bytes / 1e6, 1),
                WORKLOADS["single"].unit: round(reads / weight_bytes, 1),
                WORKLOADS["prefill"].unit: round(GEMM_ROWS / (layers * seconds), 1),
            }
        )
    )


main()
