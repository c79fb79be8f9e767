"""Reads the headers of GGUF files: the metadata, and where each tensor lies, over all parts of a split file.

The engine makes a model's configuration and tokenizer of it; the core finds the tensors by it.
"""

import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


@dataclass(slots=True, frozen=True)
class TensorPlace:
    """One tensor: its shape (rows first), ggml's number for its format, and the file and byte at which it begins."""

    path: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


@dataclass(slots=True, frozen=True)
class GGUFHeader:
    """What stands before the tensors. `tensors` are those of every part, under the file's own names."""

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]


def is_gguf(path: Path) -> bool:
    """By its name, or where that has no suffix of the kind (a cache names files by their hash) by its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def first_part(path: Path) -> Path:
    """Where `path` is named as a later part of a split file: the first part beside it. Any other path as it is."""
    match = _PART_NAME.fullmatch(path.name)
    return path if match is None else path.with_name(_part_name(match, 1))


def require_parts(path: Path) -> None:
    """Raises FileNotFoundError naming the parts that are missing beside a file that is named as one of several."""
    if match := _PART_NAME.fullmatch(path.name):
        _part_paths(path, int(match["count"]))


def read_gguf(path: str | os.PathLike[str], vocabulary: bool = True) -> GGUFHeader:
    """The header of a file, or of all parts of the split file that this is a part of.

    `vocabulary=False` leaves lists of texts empty, which is most of a header.
    Raises FileNotFoundError naming the parts that are missing, or ValueError naming the file and what is wrong with it.
    """
    header = _read_one(os.fspath(path), vocabulary)
    count = _whole(header.metadata, "split.count", 1)
    if count == 1:
        return header
    paths = _part_paths(Path(path), count)
    parts = [_read_one(os.fspath(part), vocabulary) for part in paths]
    tensors: dict[str, TensorPlace] = {}
    for number, (part_path, part) in enumerate(zip(paths, parts, strict=True)):
        if (_whole(part.metadata, "split.no", -1), _whole(part.metadata, "split.count", 1)) != (number, count):
            raise ValueError(f"{part_path} is not part {number + 1} of {count}, as its name says")
        if twice := tensors.keys() & part.tensors.keys():
            raise ValueError(f"{part_path} holds {', '.join(sorted(twice))}, which an earlier part holds too")
        tensors.update(part.tensors)
    total = _whole(parts[0].metadata, "split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ValueError(f"the parts of {paths[0]} hold {len(tensors)} tensors; split.tensors.count is {total}")
    return replace(parts[0], tensors=tensors)


def _part_paths(path: Path, count: int) -> list[Path]:
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ValueError(
            f"{path} is one of {count} parts of a split model; the parts must lie in one folder and be named "
            f"NAME-00001-of-{count:05d}.gguf and so on"
        )
    paths = [path.with_name(_part_name(match, number)) for number in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise FileNotFoundError(f"{path.parent} lacks {', '.join(missing)}, which belong to {path.name}")
    return paths


def _part_name(match: re.Match[str], number: int) -> str:
    return f"{match['stem']}-{number:05d}-of-{match['count']}{match['suffix']}"


def _read_one(path: str, vocabulary: bool) -> GGUFHeader:
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not begin with the bytes 'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            try:
                return _read_header(_Cursor(buffer, len(_MAGIC), vocabulary), path)
            except (struct.error, IndexError, KeyError, OverflowError, MemoryError, RecursionError) as error:
                raise ValueError(f"{path}: the GGUF header is damaged or cut short ({error})") from None


def _read_header(cursor: "_Cursor", path: str) -> GGUFHeader:
    (version,) = cursor.scalars("I")
    _check_version(version, path)
    tensor_count, pair_count = cursor.scalars("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalars("I")[0])
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name = cursor.text()
        (rank,) = cursor.scalars("I")
        if rank > _MAX_DIMENSIONS:
            raise ValueError(f"{path}: tensor {name} has {rank} dimensions; there are at most {_MAX_DIMENSIONS}")
        *sizes, number, offset = cursor.scalars(f"{rank}QIQ")
        entries[name] = (tuple(reversed(sizes)), number, offset)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path}: general.alignment is {alignment!r}; it must be a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorPlace(path, shape, number, start + offset) for name, (shape, number, offset) in entries.items()
    }
    return GGUFHeader(version, metadata, tensors)


def _check_version(version: int, path: str) -> None:
    if version in _VERSIONS:
        return
    known = " and ".join(map(str, _VERSIONS))
    if int.from_bytes(version.to_bytes(4, "little"), "big") <= max(_VERSIONS):
        raise ValueError(f"{path} is a big-endian GGUF file; only little-endian ones are supported")
    raise ValueError(f"{path} is GGUF version {version}; versions {known} are supported: convert the model again")


class _Cursor:
    """A position in the mapped file; every read moves it on."""

    def __init__(self, buffer: mmap.mmap, position: int, keep_texts: bool) -> None:
        self.buffer = buffer
        self.position = position
        self.keep_texts = keep_texts

    def scalars(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.buffer, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def text(self) -> str:
        return self._texts(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalars(_SCALARS[kind])[0]
        element_kind, count = self.scalars("IQ")
        if element_kind == _STRING:
            return self._texts(count) if self.keep_texts else self._skip_texts(count)
        if element_kind == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        return list(self.scalars(f"{count}{_SCALARS[element_kind]}"))

    def _texts(self, count: int) -> list[str]:
        buffer, position = self.buffer, self.position
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            texts.append(buffer[start:position].decode("utf-8", "replace"))
        self._move_to(position)
        return texts

    def _skip_texts(self, count: int) -> list[str]:
        buffer, position = self.buffer, self.position
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + length_at(buffer, position)[0]
        self._move_to(position)
        return []

    def _move_to(self, position: int) -> None:
        if position > len(self.buffer):
            raise IndexError(f"a text ends at byte {position}, the file at {len(self.buffer)}")
        self.position = position


class Figures:
    """Looks up `<architecture>.<name>` in a file's metadata. A list with an entry per layer is read where all its
    entries are equal.

    Raises ValueError naming the key: where it is missing and has no default, where the layers differ, or where the
    value is of another kind.
    """

    _REQUIRED: object = object()

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        key = f"{self.architecture}.{name}"
        value = self.metadata.get(key, default)
        if value is self._REQUIRED:
            raise ValueError(f"the GGUF metadata lacks {key}")
        if not isinstance(value, list):
            return value
        if not value or any(entry != value[0] for entry in value):
            differs = "differs from layer to layer, which is not supported" if value else "is an empty list"
            raise ValueError(f"{key} {differs}")
        return value[0]

    def whole(self, name: str, default: Any = _REQUIRED) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{self.architecture}.{name} is {value!r}; it must be a whole number of at least 0")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self.architecture}.{name} is {value!r}; it must be a number")
        return float(value)


def _whole(metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} is {value!r}; it must be a whole number")
    return value
