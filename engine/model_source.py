"""Turns a model argument (short name, folder, .gguf file, hub id) into local files and their configuration.

`EngineArgs` calls it, in the user's process; a local path never touches the network. What is worked out of a GGUF file
(config, tokenizer) is kept in the cache, in the layout of a Hugging Face folder without weights.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..protocol.gguf_file import first_part, is_gguf
from . import hub
from .gguf_metadata import generation_config_from_gguf, hf_config_from_gguf, read_metadata
from .gguf_tokenizer import convert_gguf_tokenizer

CONVERSION_VERSION = 2
"""Raised whenever what is written for a GGUF file changes, so that older conversions are not read."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies and what its files say."""

    path: str  # absolute: a folder in Hugging Face layout or a .gguf file
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]  # empty where the model has none
    tokenizer_dir: str | None  # None: the model comes without a tokenizer


def resolve_model(name: str, revision: str | None = None, with_tokenizer: bool = True) -> ModelFiles:
    """Finds the model, fetching it where `name` is a short name or a hub id that is not on disk yet.

    `revision` applies to hub ids. `with_tokenizer=False` leaves a GGUF file's tokenizer alone, for callers that bring
    their own. Raises FileNotFoundError for a path that does not exist, ValueError for files that are not a model, and
    `hub.ModelFetchError`.
    """
    path = _local_path(name, revision)
    if path.is_file():
        return _gguf_files(path, with_tokenizer)
    tokenizer = str(path) if any((path / file).is_file() for file in TOKENIZER_FILES) else None
    return ModelFiles(
        path=str(path),
        hf_config=_read_json(path / "config.json"),
        generation_config=_read_json(path / "generation_config.json") if _has(path, "generation_config.json") else {},
        tokenizer_dir=tokenizer,
    )


def _local_path(name: str, revision: str | None) -> Path:
    """The absolute path of a folder with a config.json or of a GGUF file, under the name that it was given by: what a
    link in a download cache leads to has no suffix, and no other parts beside it."""
    if name in hub.SHORT_NAMES:
        return _model_in(hub.pull(name, revision))
    path = Path(name).expanduser()
    if path.is_dir():
        return _model_in(path.resolve())
    if path.is_file():
        if not is_gguf(path):
            raise ValueError(f"{path} is neither a folder in Hugging Face layout nor a .gguf file")
        return first_part(_absolute(path))
    if not HUB_ID.fullmatch(name) or path.suffix.lower() in (".gguf", ".safetensors"):
        raise FileNotFoundError(f"no such model file or folder: {path.absolute()}")
    return _model_in(hub.pull(name, revision))


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
    folder = _conversion_folder(path, with_tokenizer)
    if not folder.is_dir():
        _convert(path, folder, with_tokenizer)
    return ModelFiles(
        path=str(path),
        hf_config=_read_json(folder / "config.json"),
        generation_config=_read_json(folder / "generation_config.json"),
        tokenizer_dir=str(folder) if _has(folder, "tokenizer.json") else None,
    )


def _conversion_folder(path: Path, with_tokenizer: bool) -> Path:
    """Named after the file's identity: a file that has changed or was replaced gets another folder."""
    stat = path.stat()
    identity = (CONVERSION_VERSION, with_tokenizer, str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return hub.cache_dir() / "converted" / f"{path.stem}-{key}"


def _convert(path: Path, folder: Path, with_tokenizer: bool) -> None:
    """Writes the folder beside its place and renames it, so that a reader sees all of it or nothing."""
    metadata = read_metadata(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    except OSError as error:
        raise OSError(
            f"cannot keep the conversion of {path.name} under {folder.parent}: {error}; "
            "set CORESPAN_CACHE to a folder that can be written"
        ) from error
    try:
        _write_json(staging / "config.json", hf_config_from_gguf(metadata))
        _write_json(staging / "generation_config.json", generation_config_from_gguf(metadata))
        if with_tokenizer and "tokenizer.ggml.model" in metadata:
            convert_gguf_tokenizer(path, staging)
        try:
            staging.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first; its conversion is the same
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + os.linesep, encoding="utf-8")
