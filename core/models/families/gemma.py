"""Gemma 2 and 3, the text models: norms on both sides of attention and MLP, and two kinds of layers, one of which sees
a window. Gemma 2 caps scores and logits; Gemma 3 normalises queries and keys, and turns each kind by its own base."""

from dataclasses import replace

from ....shared.rope_config import read_layer_ropes
from ..spec import SANDWICH_NORMS, AttentionSpec, LayerSpec, ModelSpec, RotarySpec
from .config_fields import HfConfig, read_attention, read_mlp, read_model

_DEFAULTS = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True}
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def gemma2(config: HfConfig) -> ModelSpec:
    config = _DEFAULTS | _GEMMA2_CAPS | dict(config)
    full = replace(read_attention(config), softcap=config["attn_logit_softcapping"])
    return _gemma(config, full, replace(full, window=config["sliding_window"]), period=2)


def gemma3(config: HfConfig) -> ModelSpec:
    config = _DEFAULTS | dict(config)
    if config.get("attn_logit_softcapping"):
        raise ValueError(f"attn_logit_softcapping is {config['attn_logit_softcapping']!r}; Gemma 3 caps no scores")
    ropes = read_layer_ropes(config)
    full = replace(read_attention(config, ropes["full_attention"]), qk_norm=True)
    rotary = RotarySpec(full.head_dim, ropes["sliding_attention"])
    period = int(config.get("sliding_window_pattern") or 6)
    window = int(config["sliding_window"])
    if full.bidirectional:
        window = window // 2 + 1  # to either side, its own token included
    return _gemma(config, full, replace(full, rotary=rotary, window=window), period)


def _gemma(config: HfConfig, full: AttentionSpec, sliding: AttentionSpec, period: int) -> ModelSpec:
    """period: of the layers, where the config does not list them; the last of each sees everything."""
    num_layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    bias = bool(config.get("attention_bias", False))
    settings = {"scale": float(config["query_pre_attn_scalar"]) ** -0.5, "qkv_bias": bias, "o_bias": bias}
    mlp = read_mlp(config, name="hidden_activation", default="gelu_pytorch_tanh")
    by_kind = {
        kind: LayerSpec(replace(attention, **settings), mlp, SANDWICH_NORMS)
        for kind, attention in (("full_attention", full), ("sliding_attention", sliding))
    }
    model = read_model(config, [by_kind[kind] for kind in kinds])
    return replace(
        model,
        norm_offset=1.0,
        embed_scale=model.hidden_size**0.5,
        logit_softcap=config.get("final_logit_softcapping"),
    )
