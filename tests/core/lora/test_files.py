"""What adapters' files may hold: llama.cpp's GGUF, PEFT's tensors under other names, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import write_adapter, write_files
from gguf_files import write_gguf

from corespan.core.lora.adapter import GATE_UP, PARTS_A_LAYER, QKV
from corespan.core.lora.files import read_adapter
from corespan.core.models.gguf import llama_row_order
from corespan.core.models.registry import resolve_model_spec
from corespan.core.models.spec import ModelSpec

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = torch.randn(4, 64), torch.randn(64, 4)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-5}
    return resolve_model_spec({**config, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64})


def read(folder: Path | str, spec: ModelSpec) -> Any:
    return read_adapter(str(folder), spec, torch.float32, 16)


@pytest.mark.parametrize(
    "name",
    [
        "{}.lora_A.weight",
        "{}.lora_A.default.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_tensors_are_known_under_every_prefix(spec: ModelSpec, tmp_path: Path, name: str) -> None:
    name = name.format(Q0)
    write_files(tmp_path, {name: A, name.replace("lora_A", "lora_B"): B}, lora_alpha=8)
    (place,) = (adapter := read(tmp_path, spec)).parts
    assert place == QKV
    assert torch.equal(adapter.parts[place].b, B * 2)


def test_a_file_of_torch_tensors_is_read_and_nothing_else_in_it_is_run(spec: ModelSpec, tmp_path: Path) -> None:
    folder = Path(write_files(tmp_path, {f"{Q0}.lora_A.weight": A, f"{Q0}.lora_B.weight": B}))
    (folder / "adapter_model.safetensors").unlink()
    torch.save({f"{Q0}.lora_A.weight": A, f"{Q0}.lora_B.weight": B}, folder / "adapter_model.bin")
    assert torch.equal(read(folder, spec).parts[QKV].a, A)
    torch.save({"a": Path("/")}, folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="holds more than tensors"):
        read(folder, spec)


REFUSED: dict[str, tuple[Mapping[str, torch.Tensor], str]] = {
    "nothing": ({}, "it applies to nothing"),
    "half": ({f"{Q0}.lora_A.weight": A}, "has lora_A alone"),
    "no factor": ({f"{Q0}.weight": A}, "which is no lora_A or lora_B"),
    "other layer": (
        {f"{Q0.replace('0', '7')}.lora_A.weight": A, f"{Q0.replace('0', '7')}.lora_B.weight": B},
        r"changes model.layers.7.self_attn.q_proj; of this model an adapter can change .*layers 0..1",
    ),
    "head": ({"base_model.model.lm_head.lora_A.weight": A}, "changes lm_head"),
    "embedding": ({"base_model.model.model.embed_tokens.lora_embedding_A": A}, "no lora_A or lora_B"),
    "other model": (
        {f"{Q0}.lora_A.weight": torch.randn(4, 32), f"{Q0}.lora_B.weight": B},
        r"lora_A \[4, 32\] .* fit this model's \[64, 64\]",
    ),
    "not finite": ({f"{Q0}.lora_A.weight": A * float("nan"), f"{Q0}.lora_B.weight": B}, "not finite"),
    "integers": ({f"{Q0}.lora_A.weight": A.int(), f"{Q0}.lora_B.weight": B}, "torch.int32"),
    "other rank": ({f"{Q0}.lora_A.weight": A[:2].clone(), f"{Q0}.lora_B.weight": B[:, :2].clone()}, "of rank 2, by"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(spec: ModelSpec, tmp_path: Path, case: str) -> None:
    tensors, message = REFUSED[case]
    write_files(tmp_path, tensors)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, spec)


@pytest.mark.parametrize(
    "config",
    [
        {"r": 0},
        {"r": "4"},
        {"lora_alpha": None},
        {"rank_pattern": {"q_proj": -1}},
        {"rank_pattern": [1]},
        {"alpha_pattern": {"(": 1}},
        {"peft_type": "IA3"},
        {"use_dora": True, "bias": "lora_only"},
        {"trainable_token_indices": [1]},
    ],
    ids=str,
)
def test_configs_that_ask_for_something_else_are_refused(
    spec: ModelSpec, tmp_path: Path, config: dict[str, Any]
) -> None:
    write_files(tmp_path, {f"{Q0}.lora_A.weight": A, f"{Q0}.lora_B.weight": B}, **config)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        read(tmp_path, spec)


def gguf_adapter(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    kinds = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}
    return write_gguf(path / "adapter.gguf", "llama", {**kinds, **metadata}, arrays)


def test_gguf_adapters_are_read_with_llama_cpps_order_of_rows(spec: ModelSpec, tmp_path: Path) -> None:
    order = llama_row_order(64, 4)
    up = torch.randn(128, 4)
    tensors = {"blk.1.attn_q.weight.lora_a": A, "blk.1.attn_q.weight.lora_b": B}
    tensors |= {"blk.0.ffn_up.weight.lora_a": A, "blk.0.ffn_up.weight.lora_b": up}
    tensors |= {"rope_freqs.weight": torch.ones(8), "blk.0.attn_norm.weight": torch.ones(64)}
    parts = read(gguf_adapter(tmp_path, {}, tensors), spec).parts
    assert set(parts) == {PARTS_A_LAYER + QKV, GATE_UP + 1}
    assert torch.equal(parts[PARTS_A_LAYER + QKV].b, B[order] * 2)
    assert torch.equal(parts[GATE_UP + 1].b, up * 2)
    parts = read(gguf_adapter(tmp_path, {"adapter.lora.alpha": 0.0}, tensors), spec).parts
    assert torch.equal(parts[GATE_UP + 1].b, up)


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.type": "model"}, {}, "general.type is 'model'"),
        ({}, {"blk.0.attn_q.weight": A}, "no lora_a or lora_b"),
        ({}, {"blk.0.attn_q.weight.lora_a": A}, "has lora_A alone"),
        ({}, {"output.weight.lora_a": A, "output.weight.lora_b": B}, "changes lm_head"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, {"blk.0.attn_q.weight.lora_a": A}, "alora_invocation_tokens"),
    ],
)
def test_other_gguf_files_are_refused_by_name(
    spec: ModelSpec, tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(gguf_adapter(tmp_path, metadata, tensors), spec)


def test_the_digest_is_of_the_weights(spec: ModelSpec, tmp_path: Path) -> None:
    digests = [read(write_adapter(tmp_path / str(n), seed), spec).digest for n, seed in enumerate((1, 1, 2))]
    assert digests[0] == digests[1] != digests[2]
    assert read(write_adapter(tmp_path / "scaled", 1, lora_alpha=9), spec).digest not in digests
