"""Fixed cases of the native kernels, one call of the library each, on one thread: run under callgrind, which counts
each call's instructions apart. Prints the cases' names in the order of the calls. Loads no torch, which would take a
minute there.
"""

import ctypes
import random
from typing import Any

from corespan.core.kernels import library

BFLOAT16 = 1
BF16_WEIGHT, INT8_WEIGHT, Q4_0_WEIGHT = 0, 1, 3
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 576, 9, 3, 64
VOCAB = 8192
alive: list[Any] = []  # whatever addresses point to


def buffer(size: int) -> int:
    """The address of `size` zero bytes, on a cache line."""
    alive.append(ctypes.create_string_buffer(size + 64))
    return -(-ctypes.addressof(alive[-1]) // 64) * 64


def array(kind: Any, values: list[Any]) -> int:
    alive.append((kind * len(values))(*values))
    return ctypes.addressof(alive[-1])


def integers(*values: int) -> int:
    return array(ctypes.c_int64, list(values))


def run(name: str, *operations: library.Operation) -> None:
    print(name)
    library.run(*operations)


def norms() -> None:
    size = 2 * 16 * HIDDEN
    run("add and normalise", library.RmsNorm(
        rows=integers(16), x=buffer(size), residual=buffer(size), weight=buffer(2 * HIDDEN), out=buffer(size),
        size=HIDDEN, eps=1e-5, dtype=BFLOAT16,
    ))  # fmt: skip
    run("normalise, add and normalise", library.RmsNorm(
        rows=integers(16), x=buffer(size), x_weight=buffer(4 * HIDDEN), residual=buffer(size),
        weight=buffer(4 * HIDDEN), out=buffer(size), size=HIDDEN, eps=1e-5, dtype=BFLOAT16, wide_weights=1,
    ))  # fmt: skip


def products() -> None:
    n, k = 192, HIDDEN
    for name, weight_format, row_bytes in (
        ("bf16", BF16_WEIGHT, 2 * k),
        ("int8", INT8_WEIGHT, k),
        ("Q4_0", Q4_0_WEIGHT, k // 32 * 18),
    ):
        packed = buffer(n * row_bytes)
        run(f"{name} pack", library.Pack(format=weight_format, weight=buffer(n * row_bytes), out=packed, n=n, k=k))
        for rows in (1, 32):
            count, x = integers(rows), buffer(2 * rows * k)
            product = library.Gemm(
                rows=count, x=x, x_stride=k, x_block=32, format=weight_format, weight=packed,
                weight_scales=buffer(4 * n), out=buffer(2 * rows * n), out_stride=n, n=n, k=k,
            )  # fmt: skip
            if weight_format == BF16_WEIGHT:
                run(f"{name} product, {rows} rows", product)
                continue
            product.x, blocks = buffer(rows * k), 4 * rows * k // 32
            product.x_scales, product.x_sums, product.x_totals = buffer(blocks), buffer(blocks), buffer(4 * rows)
            run(f"{name} product, {rows} rows", library.Quantize(
                rows=count, x=x, x_stride=k, out=product.x, scales=product.x_scales, sums=product.x_sums,
                totals=product.x_totals, k=k, block=32,
            ), product)  # fmt: skip


def attention() -> None:
    """Two requests: two decodes, then two chunks of 40 tokens, after contexts of 300 and 70 tokens."""
    blocks, contexts = 48, (300, 70)
    cache_size = 2 * KV_HEADS * blocks * 16 * HEAD_DIM
    k_cache, v_cache = buffer(cache_size), buffer(cache_size)
    table = array(ctypes.c_int32, random.Random(0).sample(range(blocks), 20) * 2)
    for name, tokens in (("decode", 1), ("chunk", 40)):
        ends = [context + tokens for context in contexts]
        positions = [end - tokens + i for end in ends for i in range(tokens)]
        step = library.Step(
            num_reqs=2, query_start_loc=array(ctypes.c_int32, [0, tokens, 2 * tokens]),
            seq_lens=array(ctypes.c_int32, ends), block_table=table, table_rows=integers(0, 1), block_table_stride=20,
            block_size=16,
            positions=integers(*positions), slot_mapping=integers(*range(2 * tokens)),
        )  # fmt: skip
        alive.append(step)
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        qkv = buffer(2 * 2 * tokens * width)
        shape = {"num_blocks": blocks, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        caches = {"k_cache": k_cache, "v_cache": v_cache, "dtype": BFLOAT16, "step": ctypes.addressof(step)}
        run(f"rotate and write, {name}", library.Rotary(
            rows=integers(2 * tokens), qkv=qkv, stride=width, cos_sin=buffer(4 * 400 * HEAD_DIM), rotary_dim=HEAD_DIM,
            eps=1e-5, **shape, **caches,
        ))  # fmt: skip
        out = buffer(2 * 2 * tokens * HEADS * HEAD_DIM)
        run(f"attend, {name}", library.Attention(
            q=qkv, q_stride=width, out=out, out_stride=HEADS * HEAD_DIM, scale=0.125,
            **shape, **caches,
        ))  # fmt: skip


def sampling() -> None:
    """Temperature, top-k and top-p of two rows each, then the five largest log-probabilities."""
    draws = random.Random(1)
    logits = array(ctypes.c_float, [draws.gauss(0, 2) for _ in range(2 * VOCAB)])
    rows = {"rows": integers(2), "logits": logits, "stride": VOCAB, "n": VOCAB}

    def doubles(value: float) -> int:
        return array(ctypes.c_double, [value, value])

    for name, temperature, top_k, top_p in (("greedy", 0.0, 0, 1.0), ("top_k", 0.8, 50, 1.0), ("top_p", 0.8, 0, 0.9)):
        run(f"draw, {name}", library.Draw(
            temperature=doubles(temperature), min_p=doubles(0.0), top_k=integers(top_k, top_k), top_p=doubles(top_p),
            uniforms=doubles(0.5), token_ids=buffer(16), largest=buffer(8), **rows,
        ))  # fmt: skip
    run("log-probabilities", library.Logprobs(
        width=6, find_largest=1, normalize=1, ids=buffer(48), values=buffer(48), ranks=buffer(8), **rows,
    ))  # fmt: skip


norms()
products()
attention()
sampling()
