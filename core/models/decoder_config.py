"""A decoder's shape, read from the plain dict of a Hugging Face `config.json`. The registry names the family."""

from dataclasses import dataclass
from typing import Any

from ...shared.rope_config import RopeConfig, read_rope_config


@dataclass(slots=True, frozen=True)
class DecoderConfig:
    """Everything that tells one Llama-like decoder from another. `sliding_windows` has an entry per layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.sliding_windows)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def llama_config(hf_config: dict[str, Any]) -> DecoderConfig:
    bias = bool(hf_config.get("attention_bias", False))
    windows = (None,) * int(hf_config["num_hidden_layers"])
    return _build(hf_config, windows, qkv_bias=bias, o_bias=bias, mlp_bias=bool(hf_config.get("mlp_bias", False)))


def mistral_config(hf_config: dict[str, Any]) -> DecoderConfig:
    windows = (hf_config.get("sliding_window", 4096),) * int(hf_config["num_hidden_layers"])
    return _build(hf_config, windows)


def qwen2_config(hf_config: dict[str, Any]) -> DecoderConfig:
    return _build(hf_config, _qwen_windows(hf_config), qkv_bias=True)


def qwen3_config(hf_config: dict[str, Any]) -> DecoderConfig:
    bias = bool(hf_config.get("attention_bias", False))
    hf_config = {"head_dim": 128} | hf_config
    return _build(hf_config, _qwen_windows(hf_config), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _build(
    hf_config: dict[str, Any],
    sliding_windows: tuple[int | None, ...],
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    activation = hf_config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {activation!r}; only 'silu' is supported")
    num_heads = int(hf_config["num_attention_heads"])
    num_kv_heads = int(hf_config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = int(hf_config.get("head_dim") or hf_config["hidden_size"] // num_heads)
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; the two halves of a head rotate together, so it must be even")
    return DecoderConfig(
        vocab_size=int(hf_config["vocab_size"]),
        hidden_size=int(hf_config["hidden_size"]),
        intermediate_size=int(hf_config["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(hf_config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(hf_config.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        rope=read_rope_config(hf_config),
        sliding_windows=sliding_windows,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def _qwen_windows(hf_config: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen uses a window only when told to, and then in the layers that `layer_types` or `max_window_layers` name."""
    num_layers = int(hf_config["num_hidden_layers"])
    window = hf_config.get("sliding_window", 4096) if hf_config.get("use_sliding_window", False) else None
    layer_types = hf_config.get("layer_types")
    if layer_types is None:
        first = int(hf_config.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
