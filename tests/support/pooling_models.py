"""Tiny random models that pool, as transformers saves them."""

from pathlib import Path
from typing import Any

import numpy as np
from tiny_llama import write_tokenizer

_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def build_pooling_model(
    folder: Path, family: str = "Llama", kind: str = "Model", config_class: str = "", **config: Any
) -> str:
    """transformers' class `family` + `kind`, with a tokenizer beside it."""
    import torch
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, f"{family}{kind}")
    model_class(getattr(transformers, config_class or f"{family}Config")(**{**_SHAPE, **config})).save_pretrained(
        folder
    )
    write_tokenizer(folder)
    return str(folder)


def expected(folder: str, token_ids: list[int], kind: str = "AutoModel") -> Any:
    """transformers' final states [tokens, hidden_size], or a classifier's logits [classes], or a head's."""
    import torch
    import transformers

    model = getattr(transformers, kind).from_pretrained(folder).float().eval()
    with torch.no_grad():
        output = model(torch.tensor([token_ids]))
    return (output.last_hidden_state if kind == "AutoModel" else output.logits)[0].numpy()


def unit(vectors: Any) -> Any:
    """Brought to length 1, each."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
