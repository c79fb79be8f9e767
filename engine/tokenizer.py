"""The shell's tokenizer: text to token ids and back, straight on the `tokenizers` library.

Built once per engine by `get_tokenizer`. torch and transformers stay unloaded unless a model's folder has no
`tokenizer.json`; then transformers' own class does the work behind the same interface.
"""

import functools
import json
import os
from collections.abc import Sequence
from typing import Any, Literal, overload

import tokenizers
from tokenizers import AddedToken

from ..protocol.config import ModelConfig
from .chat_template import render_chat_template
from .token_bound import TokenBound, token_bound

_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def get_tokenizer(model_config: ModelConfig) -> "Tokenizer | None":
    """The model's tokenizer; None where the engine runs on token ids alone."""
    if model_config.tokenizer is None:
        return None
    return load_tokenizer(model_config.tokenizer, trust_remote_code=model_config.trust_remote_code)


def load_tokenizer(folder: str, trust_remote_code: bool = False) -> "Tokenizer":
    """The tokenizer kept in `folder`. Raises ValueError or OSError where there is none that can be read."""
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        return _load_with_transformers(folder, trust_remote_code)
    try:
        backend = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
    return Tokenizer(backend, _read_config(folder))


def _load_with_transformers(folder: str, trust_remote_code: bool) -> "Tokenizer":
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    config = {name: str(token) for name, token in inner.special_tokens_map.items() if isinstance(token, str)}
    if inner.chat_template is not None:
        config["chat_template"] = inner.chat_template
    if inner.is_fast:
        return Tokenizer(inner.backend_tokenizer, config)
    return TransformersTokenizer(inner, config)


def _read_config(folder: str) -> dict[str, Any]:
    """`tokenizer_config.json`, with the chat templates that newer folders keep in files of their own."""
    config: dict[str, Any] = {}
    path = os.path.join(folder, "tokenizer_config.json")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    path = os.path.join(folder, "special_tokens_map.json")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            for name, token in json.load(file).items():
                config.setdefault(name, token)
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            config["chat_template"] = file.read()
    return config


def _content(token: Any) -> str | None:
    """A special token's text; configurations spell it as text or as an object with a `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


class Tokenizer:
    """One model's vocabulary. `backend` is the `tokenizers` object, None where transformers does the work."""

    def __init__(self, backend: "tokenizers.Tokenizer | None", config: dict[str, Any]) -> None:
        self.backend = backend
        self.chat_template = _chat_templates(config.get("chat_template"))
        tokens = {name: _content(config.get(name)) for name in _NAMED_SPECIALS}
        self.special_tokens_map = {name: token for name, token in tokens.items() if token is not None}
        if backend is not None:
            self._prepare(backend, config)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.all_special_ids = self._special_ids()

    @property
    def is_fast(self) -> bool:
        return self.backend is not None

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises ValueError where it holds lone surrogates, which no UTF-8 text can."""
        check_encodable(text)
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `ids`; ids outside the vocabulary give nothing. Spaces between special tokens are a matter of
        transformers' older classes only."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own spelling of each id, None for an id that is not in it."""
        return [self._fast.id_to_token(token_id) for token_id in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return [self._fast.token_to_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        return vocab

    def __len__(self) -> int:
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def has_byte_fallback(self) -> bool:
        """Whether characters outside the vocabulary are spelled as tokens like `<0x0A>`."""
        return self.convert_tokens_to_ids(["<0x0A>"])[0] is not None

    @functools.cached_property
    def max_token_id(self) -> int:
        return max(self.get_vocab().values(), default=-1)

    def fewest_tokens(self, text: str) -> int:
        """`encode` gives no fewer tokens for `text`; 0 where nothing is known of this kind of tokenizer."""
        return 0 if self._token_bound is None else self._token_bound.fewest_tokens(text)

    @functools.cached_property
    def _token_bound(self) -> TokenBound | None:
        return None if self.backend is None else token_bound(self.backend)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Any],
        chat_template: str | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: Literal[False] = False,
        **template_kwargs: Any,
    ) -> str: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Any],
        chat_template: str | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: Literal[True],
        **template_kwargs: Any,
    ) -> list[int]: ...
    def apply_chat_template(
        self,
        messages: Sequence[Any],
        chat_template: str | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """Write a conversation as the model's prompt text, or with `tokenize` as the ids of that text.

        `chat_template`: template text, or the name of one of the model's templates; None: the model's own.
        Raises ValueError where there is no template, it fails, or the messages do not suit it.
        """
        text = render_chat_template(
            self.select_template(chat_template, with_tools=tools is not None),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens_map, **template_kwargs},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def select_template(self, chosen: str | None, with_tools: bool) -> str:
        """`chosen` itself, the template of that name, or the model's own. Raises ValueError where there is none."""
        if chosen is not None:
            return self.chat_template.get(chosen, chosen)
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self.chat_template:
                return self.chat_template[name]
        if self.chat_template:
            raise ValueError(
                f"this model has several chat templates and no default; pass one of the names "
                f"{sorted(self.chat_template)} as chat_template"
            )
        raise ValueError("this model has no chat template; pass one as chat_template")

    @property
    def _fast(self) -> "tokenizers.Tokenizer":
        assert self.backend is not None
        return self.backend

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.convert_tokens_to_ids([token])[0]

    def _special_ids(self) -> frozenset[int]:
        added = self._fast.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def _prepare(self, backend: "tokenizers.Tokenizer", config: dict[str, Any]) -> None:
        """Let the configuration have its say on which tokens are special, and no setting cut or pad a prompt."""
        backend.no_truncation()
        backend.no_padding()
        listed = config.get("added_tokens_decoder", {}).values()
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        wanted = [*self.special_tokens_map.values(), *(t["content"] for t in listed if t.get("special"))]
        missing = [token for token in dict.fromkeys(wanted) if token not in special]
        # A token outside the vocabulary would get an id that the model has no row for.
        known = [token for token in missing if backend.token_to_id(token) is not None]
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in known])


class TransformersTokenizer(Tokenizer):
    """The same interface on a tokenizer class of transformers that has no fast backend."""

    def __init__(self, inner: Any, config: dict[str, Any]) -> None:
        self.inner = inner
        super().__init__(None, config)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_encodable(text)
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        return str(
            self.inner.decode(
                list(ids),
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
        )

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return list(self.inner.convert_ids_to_tokens(list(ids)))

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return list(self.inner.convert_tokens_to_ids(list(tokens)))

    def get_vocab(self) -> dict[str, int]:
        return dict(self.inner.get_vocab())

    def __len__(self) -> int:
        return len(self.inner)

    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.inner.all_special_ids)


def check_encodable(text: str) -> None:
    """Raises ValueError for text with lone surrogates, naming the first one's place."""
    try:
        text.isascii() or text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), "
            "which no UTF-8 text can"
        ) from None


def _chat_templates(configured: Any) -> dict[str, str]:
    """Templates by name; a model's only one is called "default"."""
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, dict):
        return dict(configured)
    return {entry["name"]: entry["template"] for entry in configured or ()}
