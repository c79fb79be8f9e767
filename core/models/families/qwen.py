"""Qwen 2 and 2.5, with biases on queries, keys and values; Qwen 3, with norms on queries and keys instead."""

from dataclasses import replace

from ..spec import AttentionSpec, LayerSpec, ModelSpec
from .config_fields import HfConfig, read_attention, read_mlp, read_model, with_window


def qwen2(config: HfConfig) -> ModelSpec:
    return _qwen(config, read_attention(config, qkv_bias=True))


def qwen3(config: HfConfig) -> ModelSpec:
    config = {"head_dim": 128} | dict(config)
    bias = bool(config.get("attention_bias", False))
    return _qwen(config, replace(read_attention(config, qkv_bias=bias, o_bias=bias), qk_norm=True))


def _qwen(config: HfConfig, attention: AttentionSpec) -> ModelSpec:
    layer = LayerSpec(attention, read_mlp(config))
    return read_model(config, [with_window(layer, window) for window in _windows(config)])


def _windows(config: HfConfig) -> list[int | None]:
    """A window is used only when told to, and then in the layers that `layer_types` or `max_window_layers` name."""
    num_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = int(config.get("max_window_layers", 28))
        return [window if layer >= first else None for layer in range(num_layers)]
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    return [window if kind == "sliding_attention" else None for kind in layer_types]
