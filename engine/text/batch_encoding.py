"""What calling a tokenizer returns, under transformers' names and rules."""

from collections import UserDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers


class BatchEncoding(UserDict[str, Any]):
    """`input_ids`, `attention_mask` and what else was asked for, as keys and as attributes.

    An int as key gives that sequence's `tokenizers.Encoding` (`encodings` has them all), which knows words and offsets.
    """

    def __init__(
        self, data: dict[str, Any] | None = None, encodings: "Sequence[tokenizers.Encoding] | None" = None
    ) -> None:
        super().__init__(data)
        self.encodings = None if encodings is None else list(encodings)

    @property
    def is_fast(self) -> bool:
        return self.encodings is not None

    @property
    def n_sequences(self) -> int | None:
        return self.encodings[0].n_sequences if self.encodings else None

    def tokens(self, batch_index: int = 0) -> list[str]:
        tokens: list[str] = self._encoding(batch_index).tokens
        return tokens

    def word_ids(self, batch_index: int = 0) -> list[int | None]:
        word_ids: list[int | None] = self._encoding(batch_index).word_ids
        return word_ids

    def sequence_ids(self, batch_index: int = 0) -> list[int | None]:
        sequence_ids: list[int | None] = self._encoding(batch_index).sequence_ids
        return sequence_ids

    def _encoding(self, batch_index: int) -> "tokenizers.Encoding":
        if self.encodings is None:
            raise ValueError("this tokenizer keeps no encodings: it has no fast backend")
        return self.encodings[batch_index]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.data[key]
        if self.encodings is not None:
            return self.encodings[key]
        if isinstance(key, slice):
            return {name: values[key] for name, values in self.data.items()}
        raise KeyError(f"{key!r}: keys are names such as 'input_ids', and slices")

    def __getattr__(self, name: str) -> Any:
        if name != "data" and name in self.data:
            return self.data[name]
        raise AttributeError(
            f"this BatchEncoding has no {name!r}; it holds {list(self.__dict__.get('data', ()))}, and its "
            "`encodings` have the methods on tokens, words and characters"
        )

    def to(self, device: Any) -> "BatchEncoding":
        """Tensors on another device; what is no tensor stays as it is."""
        self.data = {name: value.to(device) if hasattr(value, "to") else value for name, value in self.data.items()}
        return self

    def convert_to_tensors(self, tensor_type: str | None) -> "BatchEncoding":
        """All values as arrays: "np", or "pt", which loads torch. Raises ValueError where lengths differ."""
        if tensor_type is not None:
            for name, values in self.data.items():
                self.data[name] = _as_tensor(name, values, tensor_type)
        return self


def _as_tensor(name: str, values: Any, tensor_type: str) -> Any:
    if tensor_type == "np":
        if len({len(row) for row in values if isinstance(row, (list, tuple))}) > 1:
            ragged = np.empty(len(values), dtype=object)
            ragged[:] = [np.asarray(row) for row in values]
            return ragged
        return np.asarray(values, dtype=None if np.size(values) else np.int64)
    if tensor_type != "pt":
        raise ValueError(f"return_tensors must be None, 'np' or 'pt', got {tensor_type!r}")
    import torch

    try:
        return torch.tensor(values, dtype=None if np.size(values) else torch.int64)
    except ValueError as error:
        raise ValueError(
            f"{name!r} cannot be made a tensor: its sequences differ in length; pass padding=True, or truncation=True "
            "with a max_length"
        ) from error
