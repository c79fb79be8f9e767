"""The shell's tokenizer: text to token ids and back, straight on the `tokenizers` library.

Built once per engine by `get_tokenizer`; users get the same object. It answers as transformers' tokenizers do, under
their names, and refuses by name what it does not do. torch and transformers stay unloaded unless a model's folder has
no `tokenizer.json` or brings a tokenizer class of its own.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

import tokenizers
from tokenizers import AddedToken

from ...shared.tokenizer_files import Token, TokenizerSettings, missing_tokens, str_of
from .batch_encoding import BatchEncoding
from .chat_template import choose_template, render_chat_template
from .lengths import CuttingBackend, Lengths, resolve_lengths
from .special_tokens import SpecialToken, SpecialTokenId
from .token_bound import TokenBound, token_bound
from .tokenizer_inputs import Text, as_batch, check_encodable, plain_ids, refuse

_CLEANED_UP = (" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're")  # these lose their space


class Tokenizer:
    """One model's vocabulary and the settings around it. Safe to call from several threads.

    Under the names, defaults and results of transformers' tokenizers: calls, `encode`, `decode` and `batch_decode`,
    `tokenize`, conversions between tokens and ids, `apply_chat_template`, the vocabulary, the special tokens (which may
    be set) and the settings. Not supported, and refused by name: whatever changes the vocabulary or saves it, targets
    (`text_target`), `pad`, masks of assistants' tokens, sanitised control tokens, and functions as tools.
    """

    is_fast = True
    pad_token_type_id = 0

    bos_token, bos_token_id = SpecialToken(), SpecialTokenId()
    eos_token, eos_token_id = SpecialToken(), SpecialTokenId()
    unk_token, unk_token_id = SpecialToken(), SpecialTokenId()
    sep_token, sep_token_id = SpecialToken(), SpecialTokenId()
    pad_token, pad_token_id = SpecialToken(), SpecialTokenId()
    cls_token, cls_token_id = SpecialToken(), SpecialTokenId()
    mask_token, mask_token_id = SpecialToken(), SpecialTokenId()

    def __init__(self, backend: "tokenizers.Tokenizer", settings: TokenizerSettings | None = None) -> None:
        settings = settings or TokenizerSettings()
        self._apply_settings(settings)
        self.backend_tokenizer = backend
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = settings.split_special_tokens
        backend.add_tokens(missing_tokens(backend, settings))
        added = backend.get_added_tokens_decoder()
        self.skipped_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """The ids that decoding with `skip_special_tokens` leaves out."""
        self._cutting_backend = CuttingBackend(backend)

    def _apply_settings(self, settings: TokenizerSettings) -> None:
        self.name_or_path = settings.name_or_path
        self.chat_template = settings.chat_template
        self.model_max_length = settings.model_max_length
        self.padding_side = settings.padding_side
        self.truncation_side = settings.truncation_side
        self.model_input_names = settings.model_input_names
        self.clean_up_tokenization_spaces = settings.clean_up_tokenization_spaces
        self.split_special_tokens = settings.split_special_tokens
        self._special_tokens = {name: str_of(token) for name, token in settings.special_tokens.items()}
        self.extra_special_tokens = [str_of(token) for token in settings.extra_special_tokens]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(name_or_path={self.name_or_path!r}, vocab_size={self.vocab_size}, "
            f"special_tokens={self.special_tokens_map})"
        )

    # Special tokens

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens that have names, by these."""
        return dict(self._special_tokens)

    def set_special_token(self, name: str, token: Token | None) -> None:
        if token is None:
            self._special_tokens.pop(name, None)
        elif isinstance(token, (str, AddedToken)):
            self._special_tokens[name] = str_of(token)
        else:
            raise ValueError(f"{name} must be None or a token's text, got {token!r}")

    @property
    def extra_special_tokens_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.extra_special_tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys([*self._special_tokens.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    def __getattr__(self, name: str) -> Any:
        """Special tokens by names of the model's own, such as `image_token` and `image_token_id`."""
        special: dict[str, str] = self.__dict__.get("_special_tokens", {})
        if name in special:
            return special[name]
        if name.endswith("_id") and name.removesuffix("_id") in special:
            return self.convert_tokens_to_ids(special[name.removesuffix("_id")])
        raise AttributeError(
            f"corespan's tokenizer has no {name!r}; transformers' own is at hand by "
            f"AutoTokenizer.from_pretrained({self.__dict__.get('name_or_path', '')!r})"
        )

    # The vocabulary

    @property
    def vocab_size(self) -> int:
        """How many tokens there are without the added ones; `len()` counts these too."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self.added_tokens_decoder.items()}

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        return self.get_added_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(sorted(self.backend_tokenizer.get_added_tokens_decoder().items()))

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int: ...  # type: ignore[overload-overlap]  # a str is one token
    @overload
    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]: ...
    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """The id of each token; `unk_token_id` for one that is not in the vocabulary, None where there is none."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id: int | None = self.backend_tokenizer.token_to_id(tokens)
        if token_id is None and (unknown := self.unk_token) is not None:
            token_id = self.backend_tokenizer.token_to_id(unknown)
        return token_id  # type: ignore[return-value]  # None as in transformers, which declares an int too

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str | list[str]:
        """The vocabulary's own spelling of each id, None for an id that is not in it."""
        to_token = self.backend_tokenizer.id_to_token
        if isinstance(ids, int):
            return to_token(ids)  # type: ignore[return-value]  # None as in transformers, which declares a str too
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [to_token(token_id) for token_id in map(int, ids) if token_id not in skipped]  # type: ignore[misc]

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        return int(self.backend_tokenizer.num_special_tokens_to_add(pair))

    @functools.cached_property
    def has_byte_fallback(self) -> bool:
        """Whether characters outside the vocabulary are spelled as tokens like `<0x0A>`."""
        return "<0x0A>" in self.get_vocab()

    @functools.cached_property
    def max_token_id(self) -> int:
        return max(self.get_vocab().values(), default=-1)

    def fewest_tokens(self, text: str) -> int:
        """`encode` gives no fewer tokens for `text`; 0 where nothing is known of this kind of tokenizer."""
        return 0 if self._token_bound is None else self._token_bound.fewest_tokens(text)

    @functools.cached_property
    def _token_bound(self) -> TokenBound | None:
        return token_bound(self.backend_tokenizer)

    # Text to ids

    def __call__(
        self,
        text: Text | None = None,
        text_pair: Text | None = None,
        text_target: None = None,
        text_pair_target: None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        verbose: bool = True,
        split_special_tokens: bool | None = None,
    ) -> BatchEncoding:
        """A text, or a list of texts, as `input_ids`, `attention_mask` and what else is asked for.

        Raises ValueError for arguments that are none of transformers', for lone surrogates, and for padding without a
        `pad_token`.
        """
        refuse(text_target=text_target, text_pair_target=text_pair_target)
        inputs, is_batch = as_batch(text, text_pair, is_split_into_words)
        lengths = self._lengths(padding, truncation, max_length, stride, pad_to_multiple_of, padding_side)
        split = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        options = {"add_special_tokens": add_special_tokens, "is_pretokenized": is_split_into_words}
        if lengths.change_nothing and split == self.backend_tokenizer.encode_special_tokens:
            sources = list(self.backend_tokenizer.encode_batch(inputs, **options))
        else:
            sources = self._cutting_backend.encode_batch(inputs, lengths, split, options)
        encodings = [piece for source in sources for piece in _pieces(source, return_overflowing_tokens)]
        names = self.model_input_names
        wanted = {
            "input_ids": ("ids", True),
            "token_type_ids": ("type_ids", _default(return_token_type_ids, "token_type_ids" in names)),
            "attention_mask": ("attention_mask", _default(return_attention_mask, "attention_mask" in names)),
            "special_tokens_mask": ("special_tokens_mask", return_special_tokens_mask),
            "offset_mapping": ("offsets", return_offsets_mapping),
        }
        fields = {name: field for name, (field, is_wanted) in wanted.items() if is_wanted}
        data: dict[str, Any] = {name: [getattr(piece, field) for piece in encodings] for name, field in fields.items()}
        if not is_batch and return_tensors is None and not return_overflowing_tokens:
            data = {name: values[0] for name, values in data.items()}
        if return_length:
            data["length"] = [len(piece.ids) for piece in encodings]
        if return_overflowing_tokens:
            data["overflow_to_sample_mapping"] = [
                n for n, source in enumerate(sources) for _ in _pieces(source, return_overflowing_tokens)
            ]
        return BatchEncoding(data, encodings).convert_to_tensors(return_tensors)

    @overload
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    @overload
    def encode(
        self, text: Text, text_pair: Text | None = None, add_special_tokens: bool = True, **options: Any
    ) -> Any: ...
    def encode(self, text: Text, text_pair: Text | None = None, add_special_tokens: bool = True, **options: Any) -> Any:
        """Token ids of `text`; `options` are those of a call. Raises ValueError where it holds lone surrogates, which
        no UTF-8 text can."""
        if not isinstance(text, str) or text_pair is not None or options:
            return self(text, text_pair, add_special_tokens=add_special_tokens, **options)["input_ids"]
        check_encodable(text)
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        return self(text, pair, add_special_tokens=add_special_tokens, **options).tokens()

    def _lengths(
        self,
        padding: bool | str,
        truncation: bool | str | None,
        max_length: int | None,
        stride: int,
        pad_to_multiple_of: int | None,
        padding_side: str | None,
    ) -> Lengths:
        pads, cuts, limit = resolve_lengths(padding, truncation, max_length, self.model_max_length, pad_to_multiple_of)
        if pads is not None and self.pad_token_id is None:
            raise ValueError("padding needs a pad_token, and this tokenizer has none; set one of its tokens as such")
        side = padding_side or self.padding_side
        if side not in ("left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', got {side!r}")
        return Lengths(
            pads,
            cuts,
            limit,
            stride,
            pad_to_multiple_of,
            side,
            self.truncation_side,
            pad_id=self.pad_token_id,
            pad_token=self.pad_token,
            pad_type_id=self.pad_token_type_id,
        )

    # Ids to text

    @overload
    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        spaces_between_special_tokens: bool = True,
    ) -> str: ...
    @overload
    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        spaces_between_special_tokens: bool = True,
    ) -> Any: ...
    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        spaces_between_special_tokens: bool = True,
    ) -> Any:
        """Text of an id or of a sequence of ids, a list of texts for a list of sequences; ids outside the vocabulary
        give nothing. Spaces between special tokens are a matter of transformers' older classes only."""
        token_ids = plain_ids(token_ids)
        if isinstance(token_ids, int):
            token_ids = [token_ids]
        cleans = clean_up_tokenization_spaces
        if token_ids and isinstance(token_ids[0], (list, tuple)):
            options = (skip_special_tokens, cleans, spaces_between_special_tokens)
            return [self.decode(sequence, *options) for sequence in token_ids]
        text: str = self._decode_ids(token_ids, skip_special_tokens, spaces_between_special_tokens)
        return self._cleaned_up(text) if _default(cleans, self.clean_up_tokenization_spaces) else text

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        sequences = plain_ids(sequences)
        if len(sequences) and not isinstance(sequences[0], (list, tuple)):
            sequences = [sequences]
        return [self.decode(sequence, skip_special_tokens, **options) for sequence in sequences]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        decoder = self.backend_tokenizer.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))

    def _decode_ids(self, token_ids: Sequence[int], skip_special: bool, spaces_between_special: bool) -> str:
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special)
        return text

    def _cleaned_up(self, text: str) -> str:
        """Without the spaces that word pieces leave before punctuation; a BPE vocabulary has none of these."""
        if isinstance(self.backend_tokenizer.model, tokenizers.models.BPE):
            return text
        for spaced in _CLEANED_UP:
            text = text.replace(spaced, spaced[1:])
        return text.replace(" ' ", "'")

    # Conversations

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        sanitize_control_tokens: bool = False,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """A conversation, or a list of these, as a `BatchEncoding` of the model's prompt; without `return_dict` as
        token ids, without `tokenize` as text.

        `chat_template`: a template's text, its file's path, or the name of one of the model's; None: the model's own.
        Raises ValueError where there is no template, it fails, or the messages do not suit it.
        """
        refuse(
            sanitize_control_tokens=sanitize_control_tokens,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
            continue_final_message=isinstance(continue_final_message, str) and continue_final_message,
        )
        is_batch = bool(conversation) and isinstance(conversation[0], (list, tuple))
        texts = [
            render_chat_template(
                self.get_chat_template(chat_template, tools),
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self.special_tokens_map, "documents": documents, **template_kwargs},
            )
            for messages in (conversation if is_batch else [conversation])
        ]
        rendered = texts if is_batch else texts[0]
        if not tokenize:
            return rendered
        encoded = self(
            rendered,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            add_special_tokens=False,
            return_tensors=return_tensors,
            **(tokenizer_kwargs or {}),
        )
        return encoded if return_dict else encoded["input_ids"]

    def get_chat_template(
        self, chat_template: str | os.PathLike[str] | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """The template's text; see `apply_chat_template`."""
        return choose_template(self.chat_template, chat_template, with_tools=tools is not None)


def _default(chosen: bool | None, default: bool) -> bool:
    return default if chosen is None else chosen


def _pieces(encoding: "tokenizers.Encoding", with_overflow: bool) -> "list[tokenizers.Encoding]":
    return [encoding, *encoding.overflowing] if with_overflow else [encoding]
