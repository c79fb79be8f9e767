"""The fallback for folders that `tokenizers` cannot read by itself: transformers' own class behind our interface.

Called by `load_tokenizer`; loads transformers, and with it torch.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken

from ...shared.tokenizer_files import Token, TokenizerSettings
from .batch_encoding import BatchEncoding
from .tokenizer import Tokenizer
from .tokenizer_inputs import check_encodable


def load_with_transformers(folder: str, trust_remote_code: bool) -> Tokenizer:
    """Raises ValueError or OSError where transformers cannot read the folder either."""
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    settings = TokenizerSettings(
        name_or_path=folder,
        special_tokens=inner.special_tokens_map,
        extra_special_tokens=inner.extra_special_tokens,
        chat_template=inner.chat_template,
        model_max_length=inner.model_max_length,
        padding_side=inner.padding_side,
        truncation_side=inner.truncation_side,
        model_input_names=inner.model_input_names,
        clean_up_tokenization_spaces=inner.clean_up_tokenization_spaces,
        split_special_tokens=inner.split_special_tokens,
    )
    if inner.is_fast:
        return Tokenizer(inner.backend_tokenizer, settings)
    return TransformersTokenizer(inner, settings)


class TransformersTokenizer(Tokenizer):
    """The same interface on a tokenizer class of transformers that has no fast backend."""

    is_fast = False

    def __init__(self, inner: Any, settings: TokenizerSettings) -> None:
        self.inner = inner
        self._apply_settings(settings)
        self.skipped_ids = frozenset(inner.all_special_ids)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def set_special_token(self, name: str, token: Token | None) -> None:
        super().set_special_token(name, token)
        setattr(self.inner, name, token)

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> BatchEncoding:
        for part in [text] if isinstance(text, str) else text or ():
            if isinstance(part, str):
                check_encodable(part)
        return BatchEncoding(dict(self.inner(text, *args, **options)))

    def encode(self, text: Any, *args: Any, **options: Any) -> Any:
        return self(text, return_attention_mask=False, **_by_name(args, options))["input_ids"]

    def tokenize(self, text: str, *args: Any, **options: Any) -> list[str]:
        return list(self.inner.tokenize(text, *args, **options))

    def _decode_ids(self, token_ids: Sequence[int], skip_special: bool, spaces_between_special: bool) -> str:
        return str(
            self.inner.decode(
                list(token_ids),
                skip_special_tokens=skip_special,
                clean_up_tokenization_spaces=False,
                spaces_between_special_tokens=spaces_between_special,
            )
        )

    def _cleaned_up(self, text: str) -> str:
        return str(self.inner.clean_up_tokenization(text))

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        return self.inner.convert_ids_to_tokens(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.inner.convert_tokens_to_ids(tokens)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return str(self.inner.convert_tokens_to_string(tokens))

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        return int(self.inner.num_special_tokens_to_add(pair))

    @property
    def vocab_size(self) -> int:
        return int(self.inner.vocab_size)

    def __len__(self) -> int:
        return len(self.inner)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.inner.get_vocab())

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self.inner.get_added_vocab())

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self.inner.added_tokens_decoder)

    @property
    def _token_bound(self) -> None:
        return None


def _by_name(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(("text_pair", "add_special_tokens"), args, strict=False)), **options}
