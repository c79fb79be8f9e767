"""Folders in the cache: put in place whole, with checksums beside their files, so that a damaged one is known.

Used by the hub for models and by `model_source` for what is worked out of GGUF files.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...shared.cache_folder import CacheNotWritableError

MANIFEST = ".sha256.json"  # file name -> [size in bytes, sha256]


@contextlib.contextmanager
def filled_folder(folder: Path, prefix: str, replace: bool) -> Iterator[Path]:
    """Gives an empty folder to fill, which becomes `folder` where the block ends well: a reader sees all of it or
    nothing. One that is there already makes way with `replace`, and stays otherwise.

    Raises CacheNotWritableError where nothing can be put beside `folder`, or the disk is full.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    except OSError as error:
        raise CacheNotWritableError(str(error)) from error
    content = staging / "content"
    try:
        content.mkdir()
        yield content
        _write_manifest(content)
        if replace:
            with contextlib.suppress(FileNotFoundError):
                folder.rename(staging / "replaced")
        try:
            content.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first; what it made is the same
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CacheNotWritableError(str(error)) from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def is_intact(folder: Path, verify: bool = False) -> bool:
    """Whether the folder is there with all its files, by their sizes; with `verify` by their checksums too.

    A folder without checksums counts as intact if it holds anything.
    """
    try:
        names = os.listdir(folder)
        if MANIFEST not in names:
            return bool(names)
        known: dict[str, tuple[int, str]] = json.loads((folder / MANIFEST).read_bytes())
        return all(_is_as_known(folder / name, size, sha256, verify) for name, (size, sha256) in known.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_as_known(path: Path, size: int, sha256: str, verify: bool) -> bool:
    return path.stat().st_size == size and (not verify or sha256_of(path) == sha256)


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    known = {str(path.relative_to(folder)): [path.stat().st_size, sha256_of(path)] for path in files}
    (folder / MANIFEST).write_text(json.dumps(known, indent=1))
