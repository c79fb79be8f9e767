"""Models of usual shapes with random weights: made once, kept in the cache, as a bf16 folder or as GGUF files."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from quantize import fitting, quantize
from safetensors.torch import save_file

SHAPES = {
    "1b": {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048},
        **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
        **{"intermediate_size": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    },
    "qwen3-0.6b": {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        **{"intermediate_size": 3072, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
    },
}
_COMMON = {"tie_word_embeddings": True, "max_position_embeddings": 4096, "hidden_act": "silu", "dtype": "bfloat16"}
_GGUF_PARTS = {
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
    **{"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
}


def shape_model(name: str, file: str, cache: Path) -> Path:
    """The folder, or the GGUF file of that kind, of SHAPES[name]; it is written beside its place and renamed."""
    path = cache / "benchmarks" / "shapes" / (name if file == "folder" else f"{name}.{file}.gguf")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        if file == "folder":
            write_folder(staging, SHAPES[name])
            os.rename(staging, path)
        else:
            write_gguf(staging / path.name, SHAPES[name], file)
            os.rename(staging / path.name, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return path


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    of_layer: dict[str, tuple[int, ...]] = {
        **{"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)},
        **{"self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)},
        **{"mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)},
    }
    if config["model_type"] == "qwen3":
        of_layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in of_layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def values(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Tensor `number` of a model, the same in all its files."""
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    return np.random.default_rng(number).standard_normal(shape, dtype=np.float32) / np.float32(shape[1] ** 0.5)


def write_folder(folder: Path, config: dict) -> None:
    tensors = {
        name: torch.from_numpy(values(number, shape)).bfloat16()
        for number, (name, shape) in enumerate(tensor_shapes(config).items())
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_COMMON | config, indent=1))


def write_gguf(path: Path, config: dict, file: str) -> None:
    """Without a tokenizer: the workloads are token ids."""
    writer = gguf.GGUFWriter(path, config["model_type"], use_temp_file=True)
    writer.add_context_length(_COMMON["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for number, (name, shape) in enumerate(tensor_shapes(config).items()):
        data, own_name = values(number, shape), gguf_name(name)
        if len(shape) == 1:
            writer.add_tensor(own_name, data)
        else:
            kind = fitting(kind_of(own_name, file, config["num_hidden_layers"]), shape[1])
            writer.add_tensor(own_name, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        return f"blk.{layer}.{_GGUF_PARTS[part]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def kind_of(name: str, file: str, num_layers: int) -> str:
    """Q4_K_M as llama.cpp mixes it: the head, and values and down projections of half of the layers, have six bits."""
    if file != "Q4_K_M":
        return file
    if name == "token_embd.weight":
        return "Q6_K"
    layer, part = int(name.split(".")[1]), name.split(".")[2]
    first = num_layers // 8
    finer = layer < first or layer >= 7 * num_layers // 8 or (layer - first) % 3 == 2
    return "Q6_K" if finer and part in ("attn_v", "ffn_down") else "Q4_K"
