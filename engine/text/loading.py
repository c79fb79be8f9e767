"""Loads a model's tokenizer: the shell's own, or transformers' where a folder needs that. Called by the engines."""

from pathlib import Path

from ...protocol.config import ModelConfig
from ...protocol.param_checks import check_end_ids
from ...shared.json_files import read_json_if_there
from ...shared.tokenizer_files import read_tokenizer, tokenizer_path
from .tokenizer import Tokenizer


def get_tokenizer(model_config: ModelConfig) -> Tokenizer | None:
    """The model's tokenizer; None where the engine runs on token ids alone.

    Raises what `load_tokenizer` does, and VLLMValidationError where its end token is none of the model's.
    """
    if model_config.tokenizer is None:
        return None
    tokenizer = load_tokenizer(model_config.tokenizer, trust_remote_code=model_config.trust_remote_code)
    check_end_ids("the tokenizer's eos_token_id", tokenizer.eos_token_id, model_config.vocab_size)
    return tokenizer


def load_tokenizer(folder: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer kept in `folder`. Raises ValueError or OSError where there is none that can be read."""
    if not tokenizer_path(Path(folder)).is_file() or (trust_remote_code and _brings_code(Path(folder))):
        from .transformers_tokenizer import load_with_transformers

        return load_with_transformers(folder, trust_remote_code)
    return Tokenizer(*read_tokenizer(Path(folder)))


def _brings_code(folder: Path) -> bool:
    return "auto_map" in read_json_if_there(folder / "tokenizer_config.json")
