"""What the machine allows for a model of these shapes, and what attention makes of it. roofline.py MODEL

Prints JSON lines: the measured rates with the workloads' limits that follow from them in bf16, then the single stream's
limit with quantised weights.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
from workloads import WORKLOADS

from corespan.core.attention.interface import AttentionMetadata
from corespan.core.kernels import memory
from corespan.core.kernels.linear import BlockWeight
from corespan.core.models.gguf import GGUFSource
from corespan.core.models.linear import PackedLinear
from corespan.core.models.loader import open_checkpoint
from corespan.core.models.registry import resolve_model_spec
from corespan.core.models.spec import ModelSpec
from corespan.core.models.tensor_names import head_projection, layer_projections
from corespan.core.models.tensor_source import TensorSource
from corespan.core.runtime.cpu_torch import get_attention_backend
from corespan.engine.model_files.model_source import resolve_model

GEMM_ROWS = 2048  # tokens of one prefill step
BLOCK_SIZE = 16
ATTENTION_SEQUENCES, ATTENTION_CONTEXT = 64, 2000


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
    """A sum or a maximum, whichever is faster, over 1 GiB of float32 on the pages that weights and caches lie on."""
    buffer = memory.allocate((2**28,), torch.float32).fill_(1.0)
    return buffer.nbytes / min(best_seconds(buffer.sum), best_seconds(buffer.max))


def layer_seconds(shapes: list[tuple[int, int]]) -> float:
    """Seconds for one layer's linear operations on GEMM_ROWS rows, weights packed by oneDNN."""
    total = 0.0
    for out, width in shapes:
        linear = PackedLinear(torch.randn(out, width).bfloat16(), None)
        rows = torch.randn(GEMM_ROWS, width).bfloat16()
        total += best_seconds(lambda rows=rows, linear=linear: linear(rows))
    return total


def weight_bytes(spec: ModelSpec, source: TensorSource) -> Iterator[tuple[str, int]]:
    """(format, bytes of weights that one token reads): every matrix, the embedding only where it is the head too."""
    layers = (each for index in range(len(spec.layers)) for each in layer_projections(spec, index))
    sizes = {
        f"{name}.weight": rows * projection.columns
        for projection in (head_projection(spec), *layers)
        for name, rows in zip(projection.names, projection.rows, strict=True)
    }
    elements = sum(sizes.values())
    yield "bf16", 2 * elements
    yield "int8", elements
    if isinstance(source, GGUFSource):
        tensors = source.tensors
        kept = {name for name in sizes if BlockWeight.knows(tensors[name].quant_type.name)}
        yield "gguf", sum(tensors[name].num_bytes if name in kept else 2 * size for name, size in sizes.items())


def attention_bytes_per_second(spec: ModelSpec, scattered: bool) -> float:
    """Keys and values read in a decode step's attention, over as many layers like the first as the model has:
    ATTENTION_SEQUENCES sequences of ATTENTION_CONTEXT tokens, each sequence's blocks side by side, as its prompt takes
    them from a fresh cache, or scattered at random over the cache, among all others'."""
    count, context = ATTENTION_SEQUENCES, ATTENTION_CONTEXT
    attention = spec.layers[0].attention
    backend = get_attention_backend(attention, BLOCK_SIZE, torch.bfloat16)
    blocks = -(-context // BLOCK_SIZE)
    caches = [backend.allocate(count * blocks + 1) for _ in spec.layers]
    for cache in caches:
        cache.fill_(0.5)
    heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    q, k, v = (torch.randn(count, n, attention.head_dim).bfloat16() for n in heads)
    number = count * blocks
    order = torch.randperm(number, generator=torch.Generator().manual_seed(0)) if scattered else torch.arange(number)
    table = order.int().view(count, blocks) + 1
    last = context - 1
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=torch.full((count,), context, dtype=torch.int32),
        block_table=table,
        table_rows=torch.arange(count),
        slot_mapping=table[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        positions=torch.full((count,), last),
        max_query_len=1,
        max_seq_len=context,
        num_reqs=count,
        num_tokens=count,
        num_decodes=count,
    )

    def attend() -> None:
        for cache in caches:
            backend.forward(q, k, v, cache, metadata)

    kv_bytes = 2 * count * context * attention.kv_size * torch.bfloat16.itemsize * len(spec.layers)
    return kv_bytes / best_seconds(attend, 2.0)


def main() -> None:
    source_of = resolve_model(sys.argv[1], with_tokenizer=False)
    spec = resolve_model_spec(source_of.hf_config)
    shapes = [projection.shape for projection in layer_projections(spec, 0)]
    with open_checkpoint(source_of.path) as source:
        bytes_by_format = dict(weight_bytes(spec, source))
    with torch.inference_mode():
        reads = read_bytes_per_second()
        seconds = layer_seconds(shapes)
        attention, scattered = (attention_bytes_per_second(spec, scattered) for scattered in (False, True))
    layer_weights = sum(out * width for out, width in shapes)
    measured = {
        "memory_read_GB_s": round(reads / 1e9, 1),
        "packed_gemm_GFLOP_s": round(2 * GEMM_ROWS * layer_weights / seconds / 1e9),
        "attention_GB_s": round(attention / 1e9, 1),
        "attention_share_of_read": round(attention / reads, 2),
        "scattered_attention_GB_s": round(scattered / 1e9, 1),
        "scattered_attention_share_of_read": round(scattered / reads, 2),
        WORKLOADS["prefill"].unit: round(GEMM_ROWS / (len(spec.layers) * seconds), 1),
    }
    for name, size in bytes_by_format.items():
        summary = {"engine": f"machine's limit, {name}", "weight_MB": round(size / 1e6, 1)}
        summary[WORKLOADS["single"].unit] = round(reads / size, 1)
        print(json.dumps(summary | (measured if name == "bf16" else {})))


main()
