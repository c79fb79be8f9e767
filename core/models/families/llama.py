"""Llama, and Mistral, which is a Llama with a window."""

from ..spec import LayerSpec, ModelSpec
from .config_fields import HfConfig, read_attention, read_mlp, read_model, with_window


def llama(config: HfConfig) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    mlp = read_mlp(config, bias=bool(config.get("mlp_bias", False)))
    layer = LayerSpec(read_attention(config, qkv_bias=bias, o_bias=bias), mlp)
    return read_model(config, [layer] * int(config["num_hidden_layers"]))


def mistral(config: HfConfig) -> ModelSpec:
    layer = LayerSpec(read_attention(config), read_mlp(config))
    window = config.get("sliding_window", 4096)
    return read_model(config, [with_window(layer, window)] * int(config["num_hidden_layers"]))
