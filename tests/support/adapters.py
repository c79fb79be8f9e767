"""LoRA adapters for tests, written by PEFT itself or as plain files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


Shapes = Mapping[str, tuple[int, int]]


def linear_shapes(hidden: int, inner: int, kv: int) -> Shapes:
    """[rows, columns] of a layer's matrices, where the heads are as wide as the hidden states."""
    shapes = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    return shapes | {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


TINY_LLAMA = linear_shapes(hidden=64, inner=128, kv=32)


def write_adapter(
    folder: Path, seed: int = 0, rank: int = 4, size: float = 0.3, shapes: Shapes = TINY_LLAMA, **config: Any
) -> str:
    """An adapter of all linear layers of two layers, without PEFT. `config` replaces entries of its config."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, (rows, columns) in shapes.items():
            room = "self_attn" if name[0] in "qkvo" else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{room}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * size
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * size
    return write_files(folder, tensors, r=rank, **config)


def write_files(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(ALL_LINEAR), **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return str(folder)


def peft_model(model_dir: str, **config: Any) -> Any:
    """transformers' float32 model with an adapter of PEFT's, whose every weight is random."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": list(ALL_LINEAR), **config}
    model = get_peft_model(base, LoraConfig(**settings)).eval()
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model
