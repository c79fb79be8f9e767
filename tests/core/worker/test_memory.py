"""How much memory is left, and how much weights are said to take, against what a loaded model holds."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from step_driver import make_vllm_config

from corespan.core.attention.native import NativeAttentionBackend
from corespan.core.kernels import library
from corespan.core.kernels.linear import BlockWeight, Int8Weight, PackedWeight
from corespan.core.models.decoder import Decoder, expected_tensors
from corespan.core.models.decoder_config import DecoderConfig
from corespan.core.models.gguf import GGUFSource
from corespan.core.models.linear import DenseLinear, GatedLinear, Int8Linear, Linear, NativeLinear, PackedLinear
from corespan.core.models.loader import open_checkpoint
from corespan.core.models.native_decoder import load_decoder
from corespan.core.models.registry import resolve_decoder_config
from corespan.core.worker import memory
from corespan.core.worker.worker import Worker
from corespan.shared import control_groups

HOST = 64 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where control groups are looked for, on a host with 64 GiB to spare; still without any."""
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST))
    return tmp_path


def write_group(folder: Path, **files: object) -> None:
    """memory_max="5" is a file `memory.max`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{text}\n")


def test_without_control_groups_the_host_s_memory_counts(groups: Path) -> None:
    assert memory.available_memory() == HOST
    (groups / "own").write_text("0::/../../elsewhere\n")
    assert memory.available_memory() == HOST


def test_the_tightest_group_around_the_process_counts(groups: Path) -> None:
    (groups / "own").write_text("0::/user.slice/run-4711.scope\n")
    scope = groups / "cgroup" / "user.slice" / "run-4711.scope"
    write_group(scope, memory_max=2 << 30, memory_current=1 << 30, memory_stat=f"anon 5\ninactive_file {1 << 20}")
    assert memory.available_memory() == (1 << 30) + (1 << 20)

    write_group(scope.parent, memory_max="max", memory_high=3 << 30, memory_current=(3 << 30) - 4096)
    assert memory.available_memory() == 4096

    write_group(scope.parent, memory_current=4 << 30)
    assert memory.available_memory() == 0


@pytest.mark.parametrize("seen_at", ["", "docker/4711"], ids=["in the container", "on the host"])
def test_groups_of_the_first_version_count_too(groups: Path, seen_at: str) -> None:
    (groups / "own").write_text("3:cpu,cpuacct:/docker/4711\n2:memory:/docker/4711\n")
    unlimited, folder = 9223372036854771712, groups / "cgroup" / "memory"
    write_group(folder, memory_limit_in_bytes=unlimited, memory_usage_in_bytes=5 << 30, memory_stat="cache 5")
    assert memory.available_memory() == HOST

    statistics = "inactive_file 0\ntotal_inactive_file 4096"
    write_group(folder / seen_at, memory_limit_in_bytes=2 << 30, memory_usage_in_bytes=1 << 30, memory_stat=statistics)
    assert memory.available_memory() == (1 << 30) + 4096


def linear_bytes(linear: Linear) -> int:
    if isinstance(linear, GatedLinear):
        return linear_bytes(linear.gate_up)
    if isinstance(linear, NativeLinear):
        scales = getattr(linear.packed, "weight_scales", None)
        return linear.packed.packed.nbytes + (0 if scales is None else scales.nbytes)
    if isinstance(linear, Int8Linear):
        return linear.weight.nbytes + linear.scales.nbytes
    assert isinstance(linear, (DenseLinear, PackedLinear))
    return linear.weight.numel() * linear.weight.element_size()


def model_bytes(model: Decoder) -> int:
    total = model.embed_weight.nbytes + model.norm.nbytes + linear_bytes(model.lm_head)
    for layer in model.layers:
        total += layer.input_norm.nbytes + layer.post_norm.nbytes
        total += sum(linear_bytes(linear) for linear in (layer.qkv, layer.o, layer.gate_up, layer.down))
    return total


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_take_what_is_said_they_take(llama: Any, dtype: str, quantization: str | None) -> None:
    config = make_vllm_config(str(llama[0]), llama[1], dtype=dtype)
    model_config = msgspec.structs.replace(config.model_config, quantization=quantization)
    worker = Worker(msgspec.structs.replace(config, model_config=model_config))
    model = worker.model_runner.model
    assert model is not None
    with open_checkpoint(str(llama[0])) as source:
        said, at_most = memory.weight_bytes(model.config, getattr(torch, dtype), quantization, source)
    assert said == model_bytes(model) < at_most


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


def write_llama(path: Path, config: DecoderConfig, kinds: dict[str, gguf.GGMLQuantizationType]) -> None:
    """Ones in every tensor of the model; `kinds`: in which format, by the name in the file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, shape in expected_tensors(config).items():
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
@pytest.mark.parametrize("quantization", [None, "gguf", "int8"])
def test_merged_parts_of_different_formats_count_as_they_are_kept(
    llama: Any, tmp_path: Path, quantization: str | None, tied: bool
) -> None:
    """Queries, keys and values are one product: in blocks where all three are of one format, else in bfloat16."""
    config, kind = replace(resolve_decoder_config(llama[1]), tie_word_embeddings=tied), gguf.GGMLQuantizationType
    path = tmp_path / "model.gguf"
    same = {f"blk.0.attn_{part}": kind.Q8_0 for part in "qkv"}
    mixed = {"blk.1.attn_q": kind.Q4_0, "blk.1.attn_k": kind.Q4_0, "blk.1.attn_v": kind.Q8_0}
    alone = {"blk.1.ffn_down": kind.Q4_1, "output": kind.Q8_0, "token_embd": kind.Q8_0}
    write_llama(path, config, {**same, **mixed, **alone})

    with GGUFSource(str(path)) as source:
        said, _ = memory.weight_bytes(config, torch.bfloat16, quantization, source)
        model = load_decoder(config, source, torch.bfloat16, NativeAttentionBackend, 16, quantization)

    assert said == model_bytes(model)
    kept = [type(layer.qkv.packed) for layer in model.layers[:2] if isinstance(layer.qkv, NativeLinear)]
    expected = {None: [PackedWeight] * 2, "int8": [Int8Weight] * 2, "gguf": [BlockWeight, PackedWeight]}
    assert kept == expected[quantization]


LOAD_INT8 = """
import resource, sys, torch
from corespan.core.models.loader import open_checkpoint
from corespan.core.models.ops import TorchOps
from corespan.core.models.weight_format import Projection, plan_matrix
from corespan.core.models.weights import ProjectionReader

def highest():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

head = Projection(("head",))
with open_checkpoint(sys.argv[1]) as source:
    plan = plan_matrix(head, source.shapes, {}, torch.bfloat16, "int8")
    reader = ProjectionReader(source, torch.bfloat16, TorchOps(), "int8")
    before = highest()
    reader.read(head)
print(highest() - before, plan.num_bytes + plan.loading_bytes)
"""


def test_a_load_takes_little_more_than_it_leaves_and_no_more_than_is_counted(tmp_path: Path) -> None:
    """As a whole, a matrix would pass through float32 three times. The file's own pages are there too, and can go."""
    weight = torch.ones(8192, 4096, dtype=torch.bfloat16)
    save_file({"head.weight": weight}, tmp_path / "model.safetensors")

    done = subprocess.run([sys.executable, "-c", LOAD_INT8, str(tmp_path)], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    grown, counted = map(int, done.stdout.split())
    assert grown < counted + weight.nbytes < 4 * weight.nbytes
