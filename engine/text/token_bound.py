"""How few tokens a text can have, told without tokenising it, so that a text far too long is refused at once.

Built by the tokenizer, for the kinds of tokenizers of which it can be proven.
"""

import json
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers.models import BPE

from .byte_alphabet import byte_alphabet

_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
_COMPOSED_BY_NFC = 4
"""NFC makes one character of so many at most, and one byte of so many at most."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """No token stands for more than `per_token` bytes of text, `dropped` ones left out; for characters if that is None.

    `dropped`: the bytes that the tokenizer leaves out, as its vocabulary lacks them.
    """

    per_token: int
    dropped: bytes | None

    def fewest_tokens(self, text: str) -> int:
        length = len(text) if self.dropped is None else len(text.encode(errors="ignore").translate(None, self.dropped))
        return -(-length // self.per_token)


def token_bound(backend: tokenizers.Tokenizer) -> TokenBound | None:
    """None where nothing is proven: a tokenizer that may drop any text, or fold any length of it into one token."""
    added = backend.get_added_tokens_decoder().values()
    if not isinstance(backend.model, BPE) or any(token.lstrip or token.rstrip for token in added):
        return None
    normalizers = _steps(backend.normalizer, "normalizers")
    splits = _steps(backend.pre_tokenizer, "pretokenizers")
    if not all(map(_only_composes, normalizers)) or any(step.get("behavior") == "Removed" for step in splits):
        return None
    normalizing, splitting = ({step["type"] for step in steps} for steps in (normalizers, splits))
    composed = _COMPOSED_BY_NFC if "NFC" in normalizing else 1
    if "ByteLevel" in splitting and splitting <= {"ByteLevel", "Split", "Digits"} and normalizing <= {"NFC"}:
        dropped = bytes(byte for byte, token in enumerate(byte_alphabet()) if backend.token_to_id(token) is None)
        if composed > 1 and set(dropped) - _NEVER_IN_UTF8:
            return None  # what is composed might be dropped
        lengths = [len(token.content.encode()) for token in added]
        lengths += map(len, backend.get_vocab(with_added_tokens=False))  # spelled with a character a byte
        return TokenBound(composed * max(lengths), dropped)
    if backend.model.byte_fallback and splitting <= {"Metaspace", "Split", "Digits"}:
        if any(backend.token_to_id(f"<0x{byte:02X}>") is None for byte in range(256)):
            return None
        return TokenBound(composed * max(map(len, backend.get_vocab(with_added_tokens=True))), None)
    return None


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps, as `tokenizer.json` has them."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = state[key] if state["type"] == "Sequence" else [state]
    return steps


def _only_composes(step: dict[str, Any]) -> bool:
    """Whether a step of the normalizer shortens no text but by composing characters."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")  # None: a regular expression
        return pattern is not None and len(pattern) <= len(step["content"])
    return step["type"] in ("NFC", "Prepend")
