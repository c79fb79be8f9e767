"""Tiny random models of every family, as transformers builds them, in variants that exercise each of their options."""

from pathlib import Path
from typing import Any

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}

_GEMMA3: dict[str, Any] = {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 48, "sliding_window": 24}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama_tied_with_biases_and_llama3_rope": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama_linear_rope_no_grouping": (
        "Llama",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama_with_64_heads_to_one": ("Llama", {"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 16}),
    "mistral_with_window": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "mistral_without_window": ("Mistral", {"sliding_window": None}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window_in_upper_layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3_tied_wide_heads": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_three_heads_to_one": ("Qwen3", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}),
    "qwen3_with_biases_and_layer_types": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("Gemma3", _GEMMA3),
    "gemma3_scaled_rope_own_pattern_and_head": (
        "Gemma3",
        {
            **_GEMMA3,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 12.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
        },
    ),
}


def build_tiny_model(folder: Path, variant: str) -> Any:
    """Saves the variant into `folder` and returns transformers' model, float32."""
    family, options = VARIANTS[variant]
    return build_model(folder, family, options)


def build_model(folder: Path, family: str, options: dict[str, Any]) -> Any:
    """The same for any other options. Biases and norms are random too."""
    import torch
    import transformers

    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_class(**{**_SHAPE, **options})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
    model.save_pretrained(folder)
    return model
