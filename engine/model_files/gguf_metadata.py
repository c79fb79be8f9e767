"""Makes the Hugging Face configuration of a model out of a GGUF file's metadata. Called when a model is resolved.

The `gguf` package's reader needs seconds for the vocabulary; `shared/gguf_file.py` needs a tenth.
"""

import os
import struct
from typing import Any

from ...shared.gguf_file import Figures, TensorPlace, read_gguf

_F32 = 0  # ggml's number for float32 tensors

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_GEMMA = {"gemma2": (2, 46), "gemma3": (6, 62)}
"""Of how many layers the last sees everything, and how many layers the 27B model has."""

_POOLING = {1: "MEAN", 2: "CLS", 3: "LAST"}
"""llama.cpp's numbers; others are of models that do not embed."""


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The file's key-value pairs, and three keys of our own.

    `GGUF.version`; `GGUF.tensor_shapes`, name -> shape in row-major order (rows first);
    `GGUF.rope_factors`, the float32 content of `rope_freqs.weight`, where the file has it.
    Raises FileNotFoundError, or ValueError naming the file where it is not a GGUF file or is cut short.
    """
    header = read_gguf(path)
    metadata = {**header.metadata, "GGUF.version": header.version}
    metadata["GGUF.tensor_shapes"] = {name: list(place.shape) for name, place in header.tensors.items()}
    if (place := header.tensors.get("rope_freqs.weight")) is not None:
        metadata["GGUF.rope_factors"] = _read_floats(place)
    return metadata


def _read_floats(place: TensorPlace) -> list[float]:
    if place.type_number != _F32 or len(place.shape) != 1 or not place.shape[0]:
        raise ValueError(
            f"{place.path}: rope_freqs.weight has shape {list(place.shape)} and ggml type number {place.type_number}; "
            f"it must be a vector in F32 ({_F32})"
        )
    with open(place.path, "rb") as file:
        size = 4 * place.shape[0]
        if place.offset + size > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{place.path} is truncated: rope_freqs.weight lies behind its end")
        file.seek(place.offset)
        return list(struct.unpack(f"<{place.shape[0]}f", file.read(size)))


def hf_config_from_gguf(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` that a Hugging Face folder of this model would hold.

    Raises ValueError for an architecture that is not built, or a figure that is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported: {sorted(_ARCHITECTURES)}")
    model_type, class_name = _ARCHITECTURES[architecture]
    if architecture == "llama" and "mistral" in str(metadata.get("general.name", "")).lower():
        model_type, class_name = _ARCHITECTURES["mistral"]
    figures = Figures(metadata, architecture)
    shapes = metadata["GGUF.tensor_shapes"]
    heads = figures.whole("attention.head_count")
    if not heads:
        raise ValueError(f"{architecture}.attention.head_count is 0; it must be at least 1")
    hidden_size = figures.whole("embedding_length")
    head_dim = figures.whole("attention.key_length", figures.get("rope.dimension_count", hidden_size // heads))
    _check_supported(figures, head_dim)
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": _vocab_size(metadata, architecture),
        "hidden_size": hidden_size,
        "intermediate_size": figures.whole("feed_forward_length"),
        "num_hidden_layers": figures.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": figures.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": figures.whole("context_length"),
        "rms_norm_eps": figures.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": figures.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, figures),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": "bfloat16",
    }
    window = figures.get("attention.sliding_window", None)
    config["sliding_window"] = None if window is None else figures.whole("attention.sliding_window")
    config |= _gemma_figures(figures, config) if architecture in _GEMMA else {"hidden_act": "silu"}
    if (pooling := _POOLING.get(figures.whole("pooling_type", 0))) is not None:
        config["pooling_type"] = pooling
    for name in ("bos", "eos"):
        if (token_id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = token_id
    return config


def generation_config_from_gguf(metadata: dict[str, Any]) -> dict[str, Any]:
    """What a `generation_config.json` would hold: the begin token, and every token that ends a generation."""
    config: dict[str, Any] = {}
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    if ends:
        config["eos_token_id"] = list(dict.fromkeys(ends)) if len(set(ends)) > 1 else ends[0]
    return config


def _check_supported(figures: Figures, head_dim: int) -> None:
    """Raises ValueError naming the figure, where one says that the model computes in a way that is not built."""
    figures.whole("rope.dimension_count", head_dim)
    neutral = {
        "rope.dimension_count": head_dim,  # fewer: only a part of each head is rotated
        "attention.value_length": head_dim,
        "expert_count": 0,
        "attention.causal": True,
    }
    for name, value in neutral.items():
        if (given := figures.get(name, value)) != value:
            raise ValueError(f"{figures.architecture}.{name} is {given!r}; only {value!r} is supported for this model")


def _gemma_figures(figures: Figures, config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 2 and 3 beyond the file: the pattern of windows and the rotary base of layers that
    have one, where the file does not state them, and that the 27B models scale scores by another size than a head's.
    """
    num_layers, heads, window = (
        config[name] for name in ("num_hidden_layers", "num_attention_heads", "sliding_window")
    )
    period, layers_of_27b = _GEMMA[figures.architecture]
    key = f"{figures.architecture}.attention.sliding_window_pattern"
    by_layer = figures.metadata.get(key)
    if not isinstance(by_layer, list):
        period = figures.whole("attention.sliding_window_pattern", period)
        by_layer = [bool(period and (layer + 1) % period) for layer in range(num_layers)]
    if len(by_layer) != num_layers:
        raise ValueError(f"{key} has {len(by_layer)} entries for {num_layers} layers")
    known: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if window and slides else "full_attention" for slides in by_layer],
        "query_pre_attn_scalar": config["hidden_size"] // heads if num_layers == layers_of_27b else config["head_dim"],
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if figures.get(name, None) is not None:
            known[name] = figures.number(name)
    if figures.architecture == "gemma3":
        full = {"rope_type": "default", "rope_theta": config.pop("rope_theta"), **(config.pop("rope_scaling") or {})}
        sliding = {"rope_type": "default", "rope_theta": figures.number("rope.freq_base_swa", 10000.0)}
        known["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    return known


def _vocab_size(metadata: dict[str, Any], architecture: str) -> int:
    """The embedding's rows decide: some files state a vocabulary without the padding rows."""
    if (shape := metadata["GGUF.tensor_shapes"].get("token_embd.weight")) is not None:
        return int(shape[0])
    figures = Figures(metadata, architecture)
    if figures.get("vocab_size", None) is not None:
        return figures.whole("vocab_size")
    if not isinstance(tokens := metadata.get("tokenizer.ggml.tokens"), list):
        raise ValueError(f"the GGUF file has no token_embd.weight, {architecture}.vocab_size or tokenizer.ggml.tokens")
    return len(tokens)


def _rope_scaling(metadata: dict[str, Any], figures: Figures) -> dict[str, Any] | None:
    kind = figures.get("rope.scaling.type", "none")
    if (factors := metadata.get("GGUF.rope_factors")) is not None:
        if kind != "none":
            raise ValueError(f"the GGUF file has both rope_freqs.weight and rope.scaling.type {kind!r}; not supported")
        return _llama3_scaling(factors, figures.number("rope.freq_base", 10000.0))
    if kind == "none":
        # Files older than rope.scaling.type name a linear factor alone.
        factor = figures.number("rope.scale_linear", 1.0)
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    return {"rope_type": kind, "factor": figures.number("rope.scaling.factor")}


def _llama3_scaling(factors: list[float], theta: float) -> dict[str, Any] | None:
    """The llama3 parameters behind a table of per-frequency divisors, as llama.cpp's converter writes it.

    Every published llama3 model uses low 1, high 4 and 8192 original positions, so only the factor is unknown: it is
    the largest divisor. The table is computed again from these and must agree.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if scaling["factor"] == 1.0:
        return None
    for index, stored in enumerate(factors):
        wavelength = 2 * 3.141592653589793 * theta ** (index / len(factors))
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        ramp = min(max(smooth, 0.0), 1.0)
        expected = 1.0 / ((1.0 - ramp) / scaling["factor"] + ramp)
        if abs(stored - expected) > 1e-3 * expected:
            raise ValueError("rope_freqs.weight holds a rotary scaling other than llama3's, which is not supported")
    return scaling
