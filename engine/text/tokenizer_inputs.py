"""What callers give a tokenizer, made plain lists, or refused. Called by the tokenizer and by whoever takes text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .batch_encoding import BatchEncoding

Text = str | Sequence[str] | Sequence[Sequence[str]]


def plain_ids(token_ids: Any) -> Any:
    """Ids as ints, lists and tuples, from arrays, tensors and what a call has returned too."""
    if type(token_ids) is list and (not token_ids or type(token_ids[0]) is int):
        return token_ids
    if isinstance(token_ids, (dict, BatchEncoding)):
        token_ids = token_ids["input_ids"]
    if isinstance(token_ids, np.ndarray) or callable(getattr(token_ids, "tolist", None)):
        return token_ids.tolist()
    if isinstance(token_ids, (list, tuple)) and any(callable(getattr(part, "tolist", None)) for part in token_ids):
        return [plain_ids(part) for part in token_ids]
    return token_ids if isinstance(token_ids, int) else list(token_ids)


def as_batch(text: Text | None, pair: Text | None, is_split_into_words: bool) -> tuple[list[Any], bool]:
    """The inputs of a call, and whether it was given several. Raises ValueError for what is no text."""
    for name, value in (("text", text), ("text_pair", pair)):
        if value is not None or name == "text":
            _check_texts(name, value)
    first = text[0] if text and not isinstance(text, str) else None
    is_batch = isinstance(first, (list, tuple)) if is_split_into_words else isinstance(text, (list, tuple))
    if not is_batch:
        return [(text, pair) if pair else text], False
    assert text is not None
    if pair is None:
        return list(text), True
    if isinstance(pair, str) or len(pair) != len(text):
        raise ValueError(f"text_pair must be a list of as many texts as text has, {len(text)}")
    return list(zip(text, pair, strict=True)), True


def _check_texts(name: str, value: Any, depth: int = 0) -> None:
    if isinstance(value, str):
        check_encodable(value)
    elif isinstance(value, (list, tuple)) and depth < 3:
        for part in value:
            _check_texts(name, part, depth + 1)
    else:
        raise ValueError(f"{name} must be a str or a list of them, got {type(value).__name__}")


def refuse(**arguments: object) -> None:
    """Raises NotImplementedError naming those that are not at their neutral value, None or False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"corespan's tokenizer does not support {name}; transformers' own does")


def check_encodable(text: str) -> None:
    """Raises ValueError for text with lone surrogates, naming the first one's place."""
    try:
        text.isascii() or text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), "
            "which no UTF-8 text can"
        ) from None
