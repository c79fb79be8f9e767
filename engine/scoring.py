"""Pairs of texts to be scored: which with which, and a pair as one prompt. Used by `LLM.score` and the server."""

from collections.abc import Sequence
from typing import Any

from ..protocol.config import ModelConfig
from ..protocol.param_checks import reject_type
from .text.prompts import PromptType, TextPrompt, TokensPrompt
from .text.tokenizer import Tokenizer


def paired(first: Any, second: Any) -> tuple[list[str], list[str]]:
    """The texts of each side, as many as the other's: one goes with each of the other's.

    Raises TypeError for what is no text, ValueError for empty lists and for numbers of texts that do not match.
    """
    ones, others = _texts("data_1", first), _texts("data_2", second)
    if not ones or not others:
        raise ValueError("data_1 and data_2 must hold at least one text each")
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise ValueError(f"data_1 has {len(ones)} texts and data_2 {len(others)}: give one and several, or as many")
    return ones, others


def pair_prompt(
    tokenizer: Tokenizer, model_config: ModelConfig, query: str, document: str, template: str | None, keep: int | None
) -> PromptType:
    """A query and a document as one prompt: by the template, which sees messages of the roles "query" and "document",
    or as the tokenizer puts two texts together. `keep`: at most so many tokens, -1 the model's; the document is cut.
    """
    if template is not None:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        return TextPrompt(prompt=str(text))
    limit = model_config.max_model_len if keep == -1 else keep
    options: dict[str, Any] = {} if limit is None else {"truncation": "only_second", "max_length": limit}
    return TokensPrompt(prompt_token_ids=tokenizer(query, document, **options)["input_ids"])


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        reject_type(name, given, "a text or a list of texts")
    return list(texts)
