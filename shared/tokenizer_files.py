"""Reads what a model's folder says about its tokenizer, from every file that transformers reads, in its order.

Called by `load_tokenizer` and for the core's grammars. How text is cut and merged is `tokenizer.json`'s affair alone;
here are the special tokens, added tokens, chat templates and defaults around it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from .json_files import read_json, read_json_if_there

Token = AddedToken | str

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NO_LENGTH_LIMIT = int(1e30)
"""What transformers has for `model_max_length` where the files name none."""

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_VERSIONED_FILE = re.compile(r"tokenizer\.(\d+(?:\.\d+)*)\.json")
_TRANSFORMERS_VERSION = (5, 24)  # whose rules these are

# Tokens that a class of transformers has where the files name none.
_GPT2_END = "<|endoftext|>"
_CLASS_TOKENS: dict[str, dict[str, str | None]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": {"unk_token": _GPT2_END, "bos_token": _GPT2_END, "eos_token": _GPT2_END, "pad_token": None},
    "Qwen2Tokenizer": {"unk_token": _GPT2_END, "bos_token": None, "eos_token": _GPT2_END, "pad_token": _GPT2_END},
}
_LEFT_PADDING_CLASSES = ("LlamaTokenizer",)


@dataclass(slots=True)
class TokenizerSettings:
    """What stands around a tokenizer's vocabulary, under transformers' names."""

    name_or_path: str = ""
    special_tokens: dict[str, Token] = field(default_factory=dict)  # by name, such as bos_token
    extra_special_tokens: list[Token] = field(default_factory=list)
    added_tokens: list[AddedToken] = field(default_factory=list)  # by id
    chat_template: str | dict[str, str] | None = None  # several: by name
    model_max_length: int = NO_LENGTH_LIMIT
    padding_side: str = "right"
    truncation_side: str = "right"
    model_input_names: list[str] = field(default_factory=lambda: ["input_ids", "attention_mask"])
    clean_up_tokenization_spaces: bool = False
    split_special_tokens: bool = False


def tokenizer_path(folder: Path) -> Path:
    """The `tokenizer.json` that counts: folders may hold several, for ranges of transformers' versions."""
    chosen = "tokenizer.json"
    listed = read_json_if_there(folder / "tokenizer_config.json").get("fast_tokenizer_files") or ()
    matches = filter(None, (_VERSIONED_FILE.search(name) for name in listed))
    versions = {tuple(map(int, match[1].split("."))): match.string for match in matches}
    for version in sorted(versions):
        if version <= _TRANSFORMERS_VERSION:
            chosen = versions[version]
    return folder / chosen


def read_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """What the folder's `tokenizer.json` gives, without `missing_tokens`, and what its other files say.

    Raises OSError or ValueError where one of them cannot be read.
    """
    path = tokenizer_path(folder)
    text = path.read_text(encoding="utf-8")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
    return backend, _read_settings(folder, backend, is_byte_level='"ByteLevel"' in text)


def _read_settings(folder: Path, backend: tokenizers.Tokenizer, is_byte_level: bool) -> TokenizerSettings:
    """What the folder's files say. `backend` is what its `tokenizer.json` gives.

    Raises ValueError naming file and field for what is none of the forms that transformers reads.
    """
    path = folder / "tokenizer_config.json"
    config = read_json_if_there(path)
    class_name = _class_name(config, read_json_if_there(folder / "config.json"), is_byte_level)
    special, extra, added = _read_special_tokens(folder, config, backend)
    for name, token in _CLASS_TOKENS.get(class_name, {}).items():
        special.setdefault(name, token)
    padding, truncation = backend.padding or {}, backend.truncation or {}
    if padding:
        special.setdefault("pad_token", padding["pad_token"])
    left = class_name in _LEFT_PADDING_CLASSES
    max_length = config.get("model_max_length", config.get("max_len"))
    return TokenizerSettings(
        name_or_path=str(folder),
        special_tokens={name: token for name, token in _in_order(special) if token is not None},
        extra_special_tokens=extra,
        added_tokens=added,
        chat_template=_read_templates(folder, config),
        model_max_length=NO_LENGTH_LIMIT if max_length is None else max_length,
        padding_side=_side(path, config, "padding_side", padding.get("direction", "left" if left else "right")),
        truncation_side=_side(path, config, "truncation_side", truncation.get("direction", "right")),
        model_input_names=list(config.get("model_input_names") or ("input_ids", "attention_mask")),
        clean_up_tokenization_spaces=bool(config.get("clean_up_tokenization_spaces", False)),
        split_special_tokens=bool(config.get("split_special_tokens", False)),
    )


def missing_tokens(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> list[AddedToken]:
    """What the settings add to the tokens that `tokenizer.json` lists, or list otherwise than that does."""
    present = backend.get_added_tokens_decoder().values()
    known = {repr(token) for token in present}
    missing = [token for token in settings.added_tokens if repr(token) not in known]
    contents = {token.content for token in (*present, *missing)}
    named = {str_of(token) for token in settings.special_tokens.values()}
    for token in (*settings.special_tokens.values(), *settings.extra_special_tokens):
        if str_of(token) not in contents:
            missing.append(AddedToken(token, special=True) if isinstance(token, str) else token)
            contents.add(str_of(token))
    for token in missing:
        token.special = token.special or token.content in named
    return missing


def str_of(token: Token) -> str:
    return token if isinstance(token, str) else str(token.content)


def _class_name(config: Mapping[str, Any], hf_config: Mapping[str, Any], is_byte_level: bool) -> str:
    """The class that transformers takes for the folder, as far as its defaults matter here."""
    declared = str(config.get("tokenizer_class") or hf_config.get("tokenizer_class") or "").removesuffix("Fast")
    model_type = hf_config.get("model_type")
    if model_type == "qwen2":  # whatever is declared
        return "Qwen2Tokenizer"
    if model_type == "mistral" or (declared == "LlamaTokenizer" and is_byte_level):
        return "TokenizersBackend"
    return declared or ("Qwen2Tokenizer" if model_type == "qwen3" else "TokenizersBackend")


def _read_special_tokens(
    folder: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> tuple[dict[str, Token | None], list[Token], list[AddedToken]]:
    """Tokens by name (a name may be set to None), extra ones, and all added ones by id.

    `special_tokens_map.json` and `added_tokens.json` count only where the configuration lists no added tokens itself.
    """
    path, map_path = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    is_legacy = "added_tokens_decoder" not in config
    mapped = read_json_if_there(map_path) if is_legacy else {}
    named = _named_tokens(path, config) | _named_tokens(map_path, mapped, special=True)
    extra: list[Token] = []
    former = "additional_special_tokens"  # the same under its former name; counts where nothing else is there
    for source, fields in ((path, config), (map_path, mapped)):
        tokens = fields.get("extra_special_tokens") or (() if extra else fields.get(former)) or ()
        if isinstance(tokens, dict):  # by names of the model's own, such as image_token
            named |= {name: _token(f"{source}: extra_special_tokens[{name!r}]", tokens[name]) for name in tokens}
        else:
            extra += [token for token in _token_list(source, tokens) if token not in extra]
    if is_legacy:
        special = {str(token) for token in (*named.values(), *extra) if token is not None}
        listed = _legacy_added_tokens(folder, special) | backend.get_added_tokens_decoder()
    else:
        listed = {
            int(index): _added_token(path, index, token) for index, token in config["added_tokens_decoder"].items()
        }
    return named, extra, [listed[index] for index in sorted(listed)]


def _named_tokens(path: Path, fields: Mapping[str, Any], special: bool = False) -> dict[str, Token | None]:
    """The seven names that every tokenizer may have, and all other fields called `..._token` that hold a token."""
    named: dict[str, Token | None] = {}
    for name, value in fields.items():
        if name in NAMED_TOKENS:
            named[name] = None if value is None else _token(f"{path}: {name}", value, special)
        elif name.endswith("_token") and isinstance(value, (str, dict)):
            named[name] = _token(f"{path}: {name}", value, special)
    return named


def _token_list(path: Path, tokens: Any) -> list[Token]:
    if not isinstance(tokens, (list, tuple)):
        raise ValueError(f"{path}: extra_special_tokens must hold tokens in a list or a dict by name, got {tokens!r}")
    return [_token(f"{path}: extra_special_tokens[{n}]", token) for n, token in enumerate(tokens)]


def _token(where: str, value: Any, special: bool = False) -> Token:
    """A token as files spell it: its text, or an object with its `content` and flags. `special`: in spite of these."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {flag: bool(value[flag]) for flag in _TOKEN_FLAGS if flag in value}
        return AddedToken(value["content"], **{**flags, "special": True} if special else flags)
    raise ValueError(f"{where} must be a token's text or an object with its 'content', got {value!r}")


def _added_token(path: Path, index: str, value: Any) -> AddedToken:
    token = _token(f"{path}: added_tokens_decoder[{index!r}]", value)
    return AddedToken(token) if isinstance(token, str) else token


def _legacy_added_tokens(folder: Path, special: set[str]) -> dict[int, AddedToken]:
    """`added_tokens.json`: text -> id. Those that are special are known by name only."""
    return {
        index: AddedToken(text, normalized=text not in special, special=text in special)
        for text, index in read_json_if_there(folder / "added_tokens.json").items()
    }


def _in_order(special: dict[str, Token | None]) -> list[tuple[str, Token | None]]:
    """The seven common names first, in transformers' order, then the model's own."""
    names = [name for name in NAMED_TOKENS if name in special]
    return [(name, special[name]) for name in [*names, *(name for name in special if name not in NAMED_TOKENS)]]


def _side(path: Path, config: Mapping[str, Any], name: str, default: str) -> str:
    side = str(config.get(name, default))
    if side not in ("left", "right"):
        raise ValueError(f"{path}: {name} must be 'left' or 'right', got {side!r}")
    return side


def _read_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by name. Templates in files of their own take the place of the configuration's;
    `chat_template.json`, which transformers keeps beside processors, counts where there is no other."""
    in_files = {}
    if (path := folder / "chat_template.jinja").is_file():
        in_files["default"] = path.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        in_files[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
    configured: Any = in_files or config.get("chat_template")
    path = folder / "tokenizer_config.json"
    if configured is None and (folder / "chat_template.json").is_file():
        path = folder / "chat_template.json"
        configured = read_json(path).get("chat_template")
    if isinstance(configured, list):
        try:
            configured = {entry["name"]: entry["template"] for entry in configured}
        except (KeyError, TypeError):
            raise ValueError(f"{path}: each of several chat templates needs a 'name' and a 'template'") from None
    if isinstance(configured, dict):
        if not all(isinstance(template, str) for template in configured.values()):
            raise ValueError(f"{path}: a chat template must be text")
        return configured["default"] if in_files and list(configured) == ["default"] else configured
    if configured is not None and not isinstance(configured, str):
        raise ValueError(f"{path}: chat_template must be text or a list of named templates, got {configured!r}")
    return configured
