"""How much memory is left, and how much weights are said to take, against what a loaded model holds."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import msgspec
import numpy as np
import psutil
import pytest
import torch
from step_driver import make_vllm_config
from tiny_models import build_tiny_model

from corespan.core.kernels.linear import PackedWeight
from corespan.core.models.decoder import Decoder
from corespan.core.models.gguf import GGUFSource
from corespan.core.models.linear import DenseLinear, GatedLinear, Int8Linear, Linear, NativeLinear, PackedLinear
from corespan.core.models.loader import open_checkpoint
from corespan.core.models.registry import resolve_decoder_config
from corespan.core.worker import memory
from corespan.core.worker.worker import Worker
from corespan.protocol import control_groups

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
        said = memory.weight_bytes(model.config, getattr(torch, dtype), quantization, source)
    assert said == model_bytes(model)


@pytest.mark.skipif(not PackedWeight.supports(torch.bfloat16, 64, 64), reason="no native kernels for bfloat16")
def test_a_gguf_file_s_own_blocks_count_as_they_lie_in_the_file(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "qwen2_tied")
    config = resolve_decoder_config(json.loads((tmp_path / "config.json").read_text()))
    head = np.ones((config.vocab_size, config.hidden_size), dtype=np.float32)
    down = np.ones((config.hidden_size, config.intermediate_size), dtype=np.float32)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, values, kind in (
        ("token_embd.weight", head, gguf.GGMLQuantizationType.Q4_1),
        ("blk.0.ffn_down.weight", down, gguf.GGMLQuantizationType.Q8_0),
        ("blk.1.ffn_down.weight", down, gguf.GGMLQuantizationType.F16),
    ):
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFSource(str(path)) as source:
        plain = memory.weight_bytes(config, torch.bfloat16, None, source)
        kept = memory.weight_bytes(config, torch.bfloat16, "gguf", source)
        without_kernels = memory.weight_bytes(config, torch.float32, "gguf", source)
        assert without_kernels == memory.weight_bytes(config, torch.float32, None, source)
    assert plain - kept == head.size * 2 - head.size // 32 * 20 + down.size * 2 - down.size // 32 * 34
