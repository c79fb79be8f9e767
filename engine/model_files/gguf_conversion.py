"""A GGUF file's configuration and tokenizer, converted to a folder of Hugging Face's layout, without weights, that the
cache keeps. Called when a model is resolved or fetched.
"""

import atexit
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from ...shared.cache_folder import CacheNotWritableError, cache_dir
from ...shared.gguf_file import require_parts
from ...shared.json_files import write_json
from .cached_folder import filled_folder, is_intact
from .gguf_metadata import generation_config_from_gguf, hf_config_from_gguf, read_metadata
from .gguf_tokenizer import convert_gguf_tokenizer

logger = logging.getLogger("corespan.engine")

CONVERSION_VERSION = 5
"""Raised whenever what is written for a GGUF file changes, so that older conversions are not read."""

_HASHED_BYTES = 2**24


def converted(path: Path, with_tokenizer: bool, verify: bool = False) -> Path:
    """The folder with the file's conversion; converts where there is none, or a damaged one (see `is_intact`).

    Where the cache cannot be written it is a temporary folder, which ends with this process. Raises FileNotFoundError
    where parts of a split file are missing.
    """
    require_parts(path)  # a conversion that is kept came of the first alone
    key = _content_key(path)
    names = [key] if with_tokenizer else [key, f"{key}-without-tokenizer"]
    try:
        return _kept_conversion(path, cache_dir() / "converted", names, with_tokenizer, verify)
    except CacheNotWritableError as error:
        reason = str(error)
    logger.warning(
        "What is worked out of %s cannot be kept in the cache, and is worked out at each start: %s. "
        "Set CORESPAN_CACHE to a folder that can be written.",
        path.name,
        reason,
    )
    return _kept_conversion(path, _temporary_folder(), names, with_tokenizer, verify)


def _kept_conversion(path: Path, parent: Path, names: list[str], with_tokenizer: bool, verify: bool) -> Path:
    """One of the folders of these `names`, the last of which is made where none is intact."""
    for folder in (parent / name for name in names):
        if is_intact(folder, verify=verify):
            return folder
    metadata = read_metadata(path)
    with filled_folder(folder, prefix=".converting-", replace=folder.is_dir()) as content:
        write_json(content / "config.json", hf_config_from_gguf(metadata))
        write_json(content / "generation_config.json", generation_config_from_gguf(metadata))
        if with_tokenizer and "tokenizer.ggml.model" in metadata:
            convert_gguf_tokenizer(path, content)
    return folder


def _content_key(path: Path) -> str:
    """A hash of the file's beginning, where all that is converted stands, and its size: the same for a copy of it.

    With weights behind them a header's tables take 10 MB at most, so that hashing does not grow with the model.
    """
    with path.open("rb") as file:
        beginning = hashlib.sha256(file.read(_HASHED_BYTES))
    beginning.update(repr((CONVERSION_VERSION, path.stat().st_size)).encode())
    return beginning.hexdigest()[:16]


@functools.cache
def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="corespan-converted-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in its forks
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
