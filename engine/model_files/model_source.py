"""Turns a model argument (short name, folder, .gguf file, hub id) into local files and their configuration.

`EngineArgs` calls it, in the user's process; a local path never touches the network.
"""

import contextlib
import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...shared.gguf_file import first_part, is_gguf
from ...shared.json_files import read_json
from . import hub
from .gguf_conversion import converted
from .sentence_transformers import SentenceTransformer, read_sentence_transformer
from .short_names import SHORT_NAMES
from .wheels import ModelFetchError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies and what its files say."""

    path: str  # absolute: a folder in Hugging Face layout or a .gguf file
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]  # empty where the model has none
    tokenizer_dir: str | None  # None: the model comes without a tokenizer
    sentence_transformer: SentenceTransformer | None = None


def resolve_model(name: str, revision: str | None = None, with_tokenizer: bool = True) -> ModelFiles:
    """Finds the model, fetching it where `name` is a short name or a hub id that is not on disk yet.

    `revision` applies to hub ids. `with_tokenizer=False` leaves a GGUF file's tokenizer alone, for callers that bring
    their own. Raises FileNotFoundError for a path that does not exist, ValueError for files that are not a model, and
    `ModelFetchError`.
    """
    path = _local_path(name, revision)
    if path.is_file():
        return _gguf_files(path, with_tokenizer)
    tokenizer = str(path) if any((path / file).is_file() for file in TOKENIZER_FILES) else None
    return ModelFiles(
        path=str(path),
        hf_config=read_json(path / "config.json"),
        generation_config=read_json(path / "generation_config.json") if _has(path, "generation_config.json") else {},
        tokenizer_dir=tokenizer,
        sentence_transformer=read_sentence_transformer(path),
    )


def fetch_model(name: str, revision: str | None = None) -> Path:
    """Makes all of a model available that starting it needs, and returns its folder. What the cache holds of it is
    checked by checksums, and mended; a GGUF file's tokenizer is converted beforehand.

    Raises `ModelFetchError`, or ValueError for files that are not a model.
    """
    folder = hub.pull(name, revision, verify=True)
    path = _model_in(folder)
    if path.is_file():
        converted(path, with_tokenizer=True, verify=True)
    return folder


def _local_path(name: str, revision: str | None) -> Path:
    """The absolute path of a folder with a config.json or of a GGUF file, under the name that it was given by: what a
    link in a download cache leads to has no suffix, and no other parts beside it."""
    if name in SHORT_NAMES:
        return _model_in(hub.pull(name, revision))
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return _model_in(path.resolve())
    if path.is_file():
        if not is_gguf(path):
            raise ValueError(f"{path} is neither a folder in Hugging Face layout nor a .gguf file")
        return first_part(_absolute(path))
    if not HUB_ID.fullmatch(name) or path.suffix.lower() in (".gguf", ".safetensors"):
        raise FileNotFoundError(f"no such model file or folder: {path.absolute()}{_did_you_mean(name)}")
    try:
        return _model_in(hub.pull(name, revision))
    except ModelFetchError as error:
        raise ModelFetchError(f"{error}{_did_you_mean(name)}") from error


def _did_you_mean(name: str) -> str:
    """A suggestion among the short names and, for a path, the files beside it; empty where nothing is close."""
    path = Path(name)
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        path = path.expanduser()
        siblings = {entry.name: str(path.with_name(entry.name)) for entry in path.parent.iterdir()}
        if close := difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.75):
            return f"; did you mean {siblings[close[0]]!r}?"
    if close := difflib.get_close_matches(path.name.lower(), SHORT_NAMES, n=1, cutoff=0.6):
        return f"; did you mean {close[0]!r}?"
    return ""


def _model_in(folder: Path) -> Path:
    if _has(folder, "config.json"):
        return folder
    files = sorted({first_part(_absolute(file)) for file in folder.iterdir() if file.suffix.lower() == ".gguf"})
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(f"{folder} holds several .gguf files; name one: {', '.join(file.name for file in files)}")
    raise ValueError(f"{folder} holds no model: neither a config.json nor a .gguf file is in it")


def _absolute(path: Path) -> Path:
    return path.parent.resolve() / path.name


def _gguf_files(path: Path, with_tokenizer: bool) -> ModelFiles:
    folder = converted(path, with_tokenizer)
    hf_config = read_json(folder / "config.json")
    pooling = hf_config.get("pooling_type")
    return ModelFiles(
        path=str(path),
        hf_config=hf_config,
        generation_config=read_json(folder / "generation_config.json"),
        tokenizer_dir=str(folder) if with_tokenizer and _has(folder, "tokenizer.json") else None,
        sentence_transformer=None if pooling is None else SentenceTransformer(pooling),
    )


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()
