"""Loads a model's tokenizer: the shell's own, or transformers' where a folder needs that. Called by the engines."""

import logging
from pathlib import Path

from ...protocol.config import ModelConfig
from ...shared.json_files import read_json_if_there
from ...shared.tokenizer_files import read_tokenizer, tokenizer_path
from .tokenizer import Tokenizer

logger = logging.getLogger("corespan.engine")


def get_tokenizer(model_config: ModelConfig) -> Tokenizer | None:
    """The model's tokenizer; None where the engine runs on token ids alone.

    Raises what `load_tokenizer` does. Warns where its end token is none of the model's, which then never comes.
    """
    if model_config.tokenizer is None:
        return None
    tokenizer = load_tokenizer(model_config.tokenizer, trust_remote_code=model_config.trust_remote_code)
    end_id, vocab_size = tokenizer.eos_token_id, model_config.vocab_size
    if end_id is not None and end_id >= vocab_size:
        logger.warning(
            "the tokenizer's end token has the id %d, and the model's ids are 0..%d: it will end nothing",
            end_id,
            vocab_size - 1,
        )
    return tokenizer


def load_tokenizer(folder: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer kept in `folder`. Raises ValueError or OSError where there is none that can be read."""
    if not tokenizer_path(Path(folder)).is_file() or (trust_remote_code and _brings_code(Path(folder))):
        from .transformers_tokenizer import load_with_transformers

        return load_with_transformers(folder, trust_remote_code)
    return Tokenizer(*read_tokenizer(Path(folder)))


def _brings_code(folder: Path) -> bool:
    return "auto_map" in read_json_if_there(folder / "tokenizer_config.json")
