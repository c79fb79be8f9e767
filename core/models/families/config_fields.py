"""Reads the parts of a `ModelSpec` from the plain dict of a Hugging Face `config.json`, under the names that most
families share. Raises KeyError for a missing key and ValueError naming a value that is not supported."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ....shared.attention_directions import attends_both_ways
from ....shared.rope_config import RopeConfig, read_rope_config
from ..spec import Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RotarySpec

HfConfig = Mapping[str, Any]

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_attention(
    config: HfConfig, rope: RopeConfig | None = None, *, qkv_bias: bool = False, o_bias: bool = False
) -> AttentionSpec:
    """Over the whole context, whole heads rotated. rope: None for what the config says of all layers."""
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; the two halves of a head rotate together, so it must be even")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary=RotarySpec(head_dim, rope or read_rope_config(config)),
        bidirectional=attends_both_ways(config),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
    )


def read_mlp(config: HfConfig, bias: bool = False, name: str = "hidden_act", default: str = "silu") -> MlpSpec:
    """name: of the key that names the activation."""
    activation = config.get(name, default)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{name} is {activation!r}; supported are {', '.join(map(repr, _ACTIVATIONS))}")
    return MlpSpec(int(config["intermediate_size"]), _ACTIVATIONS[activation], bias)


def read_model(config: HfConfig, layers: Iterable[LayerSpec]) -> ModelSpec:
    return ModelSpec(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        layers=tuple(layers),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def with_window(layer: LayerSpec, window: int | None) -> LayerSpec:
    return replace(layer, attention=replace(layer.attention, window=window))
