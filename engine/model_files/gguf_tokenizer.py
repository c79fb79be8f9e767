"""Turns the vocabulary inside a GGUF file into the `tokenizer.json` and `tokenizer_config.json` of a model folder.

Called once per file when a model is resolved. The token ids that the result gives are those of transformers' own
conversion of the same file.
"""

import logging
import os
from pathlib import Path
from typing import Any

from ...shared.json_files import write_json
from ..text.byte_alphabet import byte_alphabet
from .gguf_metadata import read_metadata
from .gguf_pretokenizers import NORMALIZERS, PRE_TOKENIZERS, byte_level

logger = logging.getLogger("corespan.engine")

_CONTROL, _USER_DEFINED = 3, 4  # ggml's token types
_SPACE = "\u2581"  # as sentencepiece spells it
_GEMMA = ("gemma", "gemma2", "gemma3")
"""Architectures whose sentencepiece vocabulary puts no space before a text, and ranks its merges by token id."""


def convert_gguf_tokenizer(gguf_path: str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `out_dir`.

    Raises ValueError where the file holds no tokenizer or one of a kind that is not built.
    """
    metadata = read_metadata(gguf_path)
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{os.fspath(gguf_path)}: tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' are supported")
    try:
        _check_vocabulary(metadata, byte_level=kind == "gpt2")
        tokenizer_config, tokenizer = _tokenizer_config(metadata), _tokenizer_json(metadata)
    except ValueError as error:
        raise ValueError(f"{os.fspath(gguf_path)}: {error}") from None
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "tokenizer.json", tokenizer)


def _check_vocabulary(metadata: dict[str, Any], byte_level: bool) -> None:
    """Raises ValueError naming the key: one that is missing, or whose content the conversion cannot use."""
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    if byte_level or "tokenizer.ggml.merges" in metadata:
        for merge in _texts(metadata, "tokenizer.ggml.merges"):
            if merge.count(" ") != 1:
                raise ValueError(f"tokenizer.ggml.merges holds {merge!r}; it must be two tokens and a space between")
    elif (scores := metadata.get("tokenizer.ggml.scores")) is None or len(scores) != len(tokens):
        raise ValueError(f"it has neither tokenizer.ggml.merges nor tokenizer.ggml.scores for its {len(tokens)} tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if kinds is not None and len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    for name in ("bos", "eos", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = metadata.get(key, 0)
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ValueError(f"{key} is {token_id!r}; the file's tokens are 0..{len(tokens) - 1}")
    if byte_level:
        _check_pre_tokenizer(metadata.get("tokenizer.ggml.pre"))


def _texts(metadata: dict[str, Any], key: str) -> list[str]:
    texts = metadata.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"it has no {key}" if texts is None else f"{key} is not a list of texts")
    return texts


def _check_pre_tokenizer(pre: Any) -> None:
    if pre is None:
        logger.warning(
            "the GGUF file does not say how text is cut into words (tokenizer.ggml.pre); it is cut the way GPT-2 does"
        )
    elif pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}, a way to cut text that is not known here; known are "
            f"{', '.join(PRE_TOKENIZERS)}. Give the original model's folder as the tokenizer"
        )


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token_id]
    if _is_gemma(metadata) and "<mask>" in tokens:
        config["mask_token"] = "<mask>"
    templates = {"default": metadata.get("tokenizer.chat_template")}
    for name in metadata.get("tokenizer.chat_templates", []):
        templates[name] = metadata.get(f"tokenizer.chat_template.{name}")
    known = {name: template for name, template in templates.items() if template is not None}
    if list(known) == ["default"]:
        config["chat_template"] = known["default"]
    elif known:
        config["chat_template"] = [{"name": name, "template": template} for name, template in known.items()]
    return config


def _adds(metadata: dict[str, Any], which: str) -> bool:
    """Whether encoding adds the begin or end token. A sentencepiece vocabulary that does not say adds the former."""
    unstated = which == "bos" and metadata["tokenizer.ggml.model"] == "llama"
    wanted = bool(metadata.get(f"tokenizer.ggml.add_{which}_token", unstated))
    return wanted and f"tokenizer.ggml.{which}_token_id" in metadata


def _tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    spelled = _byte_spelled(tokens) if byte_level else _space_spelled(tokens) if _is_gemma(metadata) else tokens
    vocab = {token: index for index, token in enumerate(spelled)}
    merges = _merges(metadata, vocab)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, vocab, byte_level),
        "normalizer": None,
        "post_processor": _post_processor(metadata),
        **(_byte_level_parts(metadata) if byte_level else _sentencepiece_parts(_is_gemma(metadata))),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "" if byte_level else None,
            "end_of_word_suffix": "" if byte_level else None,
            "fuse_unk": not byte_level,
            "byte_fallback": not byte_level,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _byte_level_parts(metadata: dict[str, Any]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    return {
        "normalizer": NORMALIZERS.get(pre),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[pre])},
        "decoder": byte_level(use_regex=True, add_prefix_space=True),
    }


def _sentencepiece_parts(gemma: bool) -> dict[str, Any]:
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if gemma:
        return {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
        }
    return {
        "pre_tokenizer": {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False},
        "decoder": {
            "type": "Sequence",
            "decoders": [*decoders, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
        },
    }


def _is_gemma(metadata: dict[str, Any]) -> bool:
    return metadata["tokenizer.ggml.model"] == "llama" and metadata.get("general.architecture") in _GEMMA


def _space_spelled(tokens: list[str]) -> list[str]:
    """Tokens of several spaces, which files of Gemma write as such, in sentencepiece's spelling."""
    return [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]


def _byte_spelled(tokens: list[str]) -> list[str]:
    """Tokens written in the byte alphabet; a token in plain text (some added ones are) is spelled over."""
    alphabet = byte_alphabet()
    known = set(alphabet)
    return [token if known.issuperset(token) else "".join(alphabet[b] for b in token.encode()) for token in tokens]


def _added_tokens(metadata: dict[str, Any], vocab: dict[str, int], byte_level: bool) -> list[dict[str, Any]]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special: dict[int, bool] = {}
    for token_id, token_type in enumerate(metadata.get("tokenizer.ggml.token_type", ())):
        # A plain-text spelling has no entry of its own in a byte-level vocabulary; adding it would enlarge that.
        if token_type in (_CONTROL, _USER_DEFINED) and vocab.get(tokens[token_id]) == token_id:
            special[token_id] = token_type == _CONTROL
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")]
    names = ("<unk>", "<mask>") if _is_gemma(metadata) else ("<unk>", "<s>", "</s>")
    defaults = [] if byte_level else [vocab.get(token) for token in names]
    for named_id in (*named, *defaults):
        if named_id is not None and vocab.get(tokens[named_id]) == named_id:
            special[named_id] = True
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special[token_id],
        }
        for token_id in sorted(special)
    ]


def _post_processor(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    specials: dict[str, Any] = {}
    for which in ("bos", "eos"):
        if _adds(metadata, which):
            token_id = metadata[f"tokenizer.ggml.{which}_token_id"]
            token = tokens[token_id]
            specials[token] = {"id": token, "ids": [token_id], "tokens": [token]}
            single.insert(0 if which == "bos" else len(single), {"SpecialToken": {"id": token, "type_id": 0}})
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}


def _merges(metadata: dict[str, Any], vocab: dict[str, int]) -> list[list[str]]:
    """The file's own merges, or else every way to build a token from two others, best score first. Gemma's scores do
    not follow the order of its merges, but its ids do."""
    if (merges := metadata.get("tokenizer.ggml.merges")) is not None:
        return [merge.split(" ") for merge in merges]
    scores: list[float] = metadata["tokenizer.ggml.scores"]
    if _is_gemma(metadata):
        scores = [-index for index in range(len(scores))]
    candidates: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        whole = [(left, right) for left, right in splits if left in vocab and right in vocab]
        for left, right in sorted(whole, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])):
            candidates.append((scores[token_id], len(left), len(right), left, right))
    candidates.sort(key=lambda candidate: candidate[:3], reverse=True)
    return [[left, right] for *_, left, right in candidates]
