"""The weight plan: in which format each matrix is kept, and that a model takes what the plan says."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from step_driver import make_vllm_config

from corespan.core.kernels import library
from corespan.core.kernels.linear import BlockWeight, Int8Weight, MixedWeight, PackedWeight
from corespan.core.models.gguf import GGUFSource
from corespan.core.models.loader import open_checkpoint
from corespan.core.models.registry import resolve_model_spec
from corespan.core.models.spec import ModelSpec
from corespan.core.models.tensor_names import expected_tensors
from corespan.core.models.tensor_source import ALL_ROWS, TensorSource
from corespan.core.models.weights import DecoderWeights
from corespan.core.runtime.cpu_native import NativeRuntime
from corespan.core.worker.worker import Worker


def num_bytes(*arrays: Any) -> int:
    return sum(array.nbytes for array in arrays if array is not None)


def matrix_bytes(matrix: Any) -> int:
    if isinstance(matrix, MixedWeight):
        return sum(map(matrix_bytes, matrix.parts))
    return num_bytes(*(getattr(matrix, name, None) for name in ("packed", "weight_scales", "weight", "scales")))


def model_bytes(weights: DecoderWeights[Any]) -> int:
    total = num_bytes(weights.norm) + matrix_bytes(weights.head)
    if not isinstance(weights.embedding, BlockWeight):
        total += num_bytes(weights.embedding)
    elif weights.embedding is not weights.head:
        total += matrix_bytes(weights.embedding)
    for layer in weights.layers:
        total += num_bytes(layer.attention_norm, layer.mlp_norm)
        total += sum(matrix_bytes(matrix) for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down))
    return total


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_take_what_the_plan_says(llama: Any, dtype: str, quantization: str | None) -> None:
    runtime = Worker(make_vllm_config(str(llama[0]), llama[1], dtype=dtype, quantization=quantization)).runtime
    with open_checkpoint(str(llama[0])) as source:
        plan = runtime.plan(source)
    assert runtime.weights is not None
    assert plan.num_bytes == model_bytes(runtime.weights) < plan.peak_bytes


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_llama(path: Path, spec: ModelSpec, kinds: dict[str, gguf.GGMLQuantizationType]) -> None:
    """Ones in every tensor of the model; `kinds`: in which format, by the name in the file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(spec.layers[0].attention.num_heads)
    writer.add_head_count_kv(spec.layers[0].attention.num_kv_heads)
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, shape in expected_tensors(spec).items():
        base = name.removesuffix(".weight")
        if base not in whole:
            _, _, index, part = base.split(".", 3)
            base = f"blk.{index}.{GGUF_NAMES[part]}"
        own_name = whole.get(base, base)
        kind = kinds.get(own_name, gguf.GGMLQuantizationType.F32)
        values = np.ones(shape, dtype=np.float32)
        writer.add_tensor(f"{own_name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.skipif(not library.is_available(), reason="no native kernels")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "dequantize", "int8"])
def test_merged_parts_of_different_formats_count_as_they_are_kept(
    llama: Any, tmp_path: Path, quantization: str | None, tied: bool
) -> None:
    """Queries, keys and values are products in blocks of their own where they are of several formats."""
    spec, kind = replace(resolve_model_spec(llama[1]), tied_head=tied), gguf.GGMLQuantizationType
    path = tmp_path / "model.gguf"
    same = {f"blk.0.attn_{part}": kind.Q8_0 for part in "qkv"}
    mixed = {"blk.1.attn_q": kind.Q4_0, "blk.1.attn_k": kind.Q4_0, "blk.1.attn_v": kind.Q8_0}
    alone = {"blk.1.ffn_down": kind.Q4_1, "output": kind.Q8_0, "token_embd": kind.Q8_0}
    write_llama(path, spec, {**same, **mixed, **alone})

    runtime = NativeRuntime(spec, torch.bfloat16, 16, quantization)
    with GGUFSource(str(path)) as source:
        plan = runtime.plan(source)
        runtime.load(plan, source)

    assert runtime.weights is not None
    assert plan.num_bytes == model_bytes(runtime.weights)
    kept = [type(layer.qkv) for layer in runtime.weights.layers[:2]]
    expected = {"dequantize": [PackedWeight] * 2, "int8": [Int8Weight] * 2, None: [BlockWeight, MixedWeight]}
    assert kept == expected[quantization]
    if quantization is None:
        assert isinstance(runtime.weights.embedding, BlockWeight)
        assert (runtime.weights.embedding is runtime.weights.head) == tied


class Llama8B(TensorSource):
    """Llama 3 8B in the mix of kinds that llama.cpp calls Q4_K_M; there is nothing to read."""

    path = "llama-3-8b.Q4_K_M.gguf"
    shapes: dict[str, tuple[int, ...]] = {}  # type: ignore[assignment]

    @property
    def block_kinds(self) -> dict[str, str]:
        more_bits = {*range(4), *range(28, 32), *range(6, 28, 3)}
        finer = {f"model.layers.{i}.{part}.weight" for i in more_bits for part in ("self_attn.v_proj", "mlp.down_proj")}
        finer.add("lm_head.weight")
        return {name: "Q6_K" if name in finer else "Q4_K" for name in expected_tensors(LLAMA_8B)}

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        raise AssertionError(name)

    def close(self) -> None: ...


LLAMA_8B = resolve_model_spec(
    {
        **{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
        **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 8192},
    }
)


@pytest.mark.skipif(not library.is_available(), reason="no native kernels")
def test_eight_billion_weights_in_q4_k_m_fit_six_gigabytes() -> None:
    """Loading included, which takes at most 15% more than what stays."""
    runtime = NativeRuntime(LLAMA_8B, torch.bfloat16, 16)
    plan = runtime.plan(Llama8B())
    assert all(layer.qkv.from_blocks and layer.down.from_blocks for layer in plan.layers)
    assert 4.9e9 < plan.num_bytes < plan.peak_bytes < min(5.5e9, 1.15 * plan.num_bytes)
    assert plan.kept_as == "the file's own blocks"


def test_blocks_of_a_file_that_has_none_are_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"quantization 'gguf' needs a \.gguf file"):
        Worker(make_vllm_config(str(llama[0]), llama[1], quantization="gguf"))


SPEC = """
from corespan.core.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
SPEC = ModelSpec(8192, 4096, (LayerSpec(AttentionSpec(1, 1, 16, 1.0, None), MlpSpec(16)),), 1e-6, tied_head=True)
"""
LOAD_INT8 = f"""
import resource, sys, torch
from corespan.core.models.loader import open_checkpoint
from corespan.core.runtime.cpu_native import NativeRuntime
{SPEC}
def highest():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

runtime = NativeRuntime(SPEC, torch.bfloat16, 16, "int8")
with open_checkpoint(sys.argv[1]) as source:
    plan = runtime.plan(source)
    before = highest()
    runtime.load(plan, source)
print(highest() - before, plan.peak_bytes)
"""


@pytest.mark.skipif(not library.is_available(), reason="no native kernels")
def test_a_load_takes_little_more_than_it_leaves_and_no_more_than_is_counted(tmp_path: Path) -> None:
    """As a whole, the head would pass through float32 three times. The file's own pages are there too, and can go."""
    names: dict[str, Any] = {}
    exec(SPEC, names)
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in expected_tensors(names["SPEC"]).items()}
    save_file(tensors, tmp_path / "model.safetensors")

    done = subprocess.run([sys.executable, "-c", LOAD_INT8, str(tmp_path)], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    grown, counted = map(int, done.stdout.split())
    embedding = tensors["model.embed_tokens.weight"].nbytes
    assert grown < counted + embedding < 5 * embedding
