"""Models of several parts: the config of the language model within theirs. The shell reads it, and hands it to the
core."""

from typing import Any

_OF_THE_WHOLE = ("architectures", "tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")


def with_text_fields(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config with what `text_config` says of the language model at its top, where a plain model has it."""
    text = hf_config.get("text_config")
    if not isinstance(text, dict):
        return hf_config
    whole = {name: hf_config[name] for name in _OF_THE_WHOLE if hf_config.get(name) is not None}
    return {**hf_config, **text, **whole}
