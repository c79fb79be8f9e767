"""Which `architectures` entry of a Hugging Face config means which decoder."""

from collections.abc import Callable
from typing import Any

from .decoder_config import DecoderConfig, llama_config, mistral_config, qwen2_config, qwen3_config

ARCHITECTURES: dict[str, Callable[[dict[str, Any]], DecoderConfig]] = {
    "LlamaForCausalLM": llama_config,
    "MistralForCausalLM": mistral_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
}


def resolve_decoder_config(hf_config: dict[str, Any]) -> DecoderConfig:
    """Raises ValueError naming the architecture when none of its entries is known, or the key that is missing."""
    architectures = hf_config.get("architectures") or []
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            try:
                return ARCHITECTURES[architecture](hf_config)
            except KeyError as error:
                raise ValueError(f"the model's config has no {error.args[0]!r}, which {architecture} needs") from None
    raise ValueError(
        f"model architecture {', '.join(architectures) or '(none given)'} is not supported; "
        f"known are {', '.join(ARCHITECTURES)}"
    )
