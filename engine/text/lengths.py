"""How a tokenizer's sequences are cut and padded, by transformers' rules."""

import copy
import threading
from dataclasses import dataclass
from typing import Any

import tokenizers

_PADDINGS: dict[bool | str, str | None] = {
    True: "longest",
    "longest": "longest",
    "max_length": "max_length",
    False: None,
    "do_not_pad": None,
}
_TRUNCATIONS: dict[bool | str | None, str | None] = {
    True: "longest_first",
    **{name: name for name in ("longest_first", "only_first", "only_second")},
    **dict.fromkeys((None, False, "do_not_truncate")),
}
_LARGEST_LENGTH = int(1e20)  # transformers' bound above which a model_max_length means that there is none


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long sequences are made. `padding`: None, "longest" or "max_length"; `truncation`: None or a strategy."""

    padding: str | None
    truncation: str | None
    max_length: int | None
    stride: int = 0
    pad_to_multiple_of: int | None = None
    padding_side: str = "right"
    truncation_side: str = "right"
    pad_id: int | None = None
    pad_token: str | None = None
    pad_type_id: int = 0

    @property
    def change_nothing(self) -> bool:
        return self.padding is None and self.truncation is None


def resolve_lengths(
    padding: bool | str,
    truncation: bool | str | None,
    max_length: int | None,
    model_max_length: int,
    pad_to_multiple_of: int | None,
) -> tuple[str | None, str | None, int | None]:
    """(padding, truncation, max_length) as `Lengths` has them. Raises ValueError naming field and value."""
    if padding not in _PADDINGS:
        raise ValueError(f"padding must be one of {list(_PADDINGS)}, got {padding!r}")
    if truncation not in _TRUNCATIONS:
        raise ValueError(f"truncation must be one of {list(_TRUNCATIONS)}, got {truncation!r}")
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 0):
        raise ValueError(f"max_length must be None or an integer of at least 0, got {max_length!r}")
    if max_length is not None and padding is False and truncation is None:
        truncation = True
    pads, cuts = _PADDINGS[padding], _TRUNCATIONS[truncation]
    if max_length is None:
        if model_max_length > _LARGEST_LENGTH:
            pads, cuts = (None if pads == "max_length" else pads), None
        elif cuts is not None or pads == "max_length":
            max_length = model_max_length
    if cuts and pads and pad_to_multiple_of and max_length is not None and max_length % pad_to_multiple_of:
        raise ValueError(f"max_length {max_length} is no multiple of pad_to_multiple_of {pad_to_multiple_of}")
    return pads, cuts, max_length


class CuttingBackend:
    """A copy of a tokenizer's backend, for calls that cut and pad: in the library that is state, which other threads
    must not meet.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._original = backend
        self._copy: tokenizers.Tokenizer | None = None  # made by the first call
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["CuttingBackend"], tuple[tokenizers.Tokenizer]]:
        """Copies, also in other processes, get a lock of their own."""
        return CuttingBackend, (self._original,)

    def encode_batch(
        self, inputs: list[Any], lengths: Lengths, split_special_tokens: bool, options: dict[str, bool]
    ) -> list[tokenizers.Encoding]:
        """Raises ValueError where the library cannot cut and pad so."""
        with self._lock:
            if self._copy is None:
                self._copy = copy.deepcopy(self._original)
            _set_lengths(self._copy, lengths)
            self._copy.encode_special_tokens = split_special_tokens
            try:
                return list(self._copy.encode_batch(inputs, **options))
            except Exception as error:  # the library raises nothing more specific
                raise ValueError(f"the text cannot be cut and padded as asked for: {error}") from error


def _set_lengths(backend: tokenizers.Tokenizer, lengths: Lengths) -> None:
    backend.no_truncation()
    backend.no_padding()
    if lengths.truncation is not None:
        assert lengths.max_length is not None
        backend.enable_truncation(
            lengths.max_length, stride=lengths.stride, strategy=lengths.truncation, direction=lengths.truncation_side
        )
    if lengths.padding is not None:
        backend.enable_padding(
            length=lengths.max_length if lengths.padding == "max_length" else None,
            direction=lengths.padding_side,
            pad_id=lengths.pad_id,
            pad_token=lengths.pad_token,
            pad_type_id=lengths.pad_type_id,
            pad_to_multiple_of=lengths.pad_to_multiple_of,
        )
