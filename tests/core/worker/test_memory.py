"""How much memory weights are said to take, against what a loaded model holds."""

import json
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
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
