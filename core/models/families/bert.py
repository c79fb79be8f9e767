"""BERT, and RoBERTa and XLM-R, which count their places from behind the padding token's."""

from dataclasses import replace

from ..encoder import EncoderActivation, EncoderSpec
from .config_fields import HfConfig

_ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def bert(config: HfConfig) -> EncoderSpec:
    """Raises ValueError naming what is not supported."""
    activation = str(config.get("hidden_act", "gelu"))
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act is {activation!r}; supported are {', '.join(_ACTIVATIONS)}")
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise ValueError(f"position_embedding_type is {kind!r}; supported is 'absolute'")
    return EncoderSpec(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=int(config["num_attention_heads"]),
        inner_size=int(config["intermediate_size"]),
        num_positions=int(config["max_position_embeddings"]),
        num_token_types=int(config.get("type_vocab_size", 2)),
        norm_eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=_ACTIVATIONS[activation],
    )


def roberta(config: HfConfig) -> EncoderSpec:
    padding_id = config.get("pad_token_id")
    return replace(bert(config), padding_id=1 if padding_id is None else int(padding_id))
