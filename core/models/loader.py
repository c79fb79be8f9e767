"""Opens checkpoints: safetensors files, single or sharded, and GGUF. The worker calls `open_checkpoint`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open

from ..lazy_torch import torch
from .gguf import GGUFSource
from .tensor_source import ALL_ROWS, TensorSource

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOATING = ("BF16", "F16", "F32")


def open_checkpoint(path: str) -> TensorSource:
    """`path`: a GGUF file or a folder with safetensors. Raises ValueError or FileNotFoundError naming the file."""
    return SafetensorsSource(path) if Path(path).is_dir() else GGUFSource(path)


_BARE = re.compile(r"(embed_tokens|layers|norm)\.")
"""How names begin in the checkpoint of a model without a head, where those with one have `model.` before it."""


class SafetensorsSource(TensorSource):
    """The safetensors files of a folder, memory-mapped; tensors of the dtype asked for are views into the file.

    Where an index says which file a tensor is to come from, the same name in another file does not count.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._paths: dict[str, str] = {}  # by file
        self._files: dict[str, safe_open] = {}  # those that something was read from
        self._file_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._unreadable: dict[str, str] = {}
        self._stored_names: dict[str, str] = {}
        folder = Path(path)
        weight_map = _weight_map(folder)
        for file in sorted(set(weight_map.values())) or _files_without_index(folder):
            self._open(folder, file, weight_map)
        if lost := sorted(name for name in weight_map if name not in self._file_of):
            raise ValueError(
                f"{folder / weight_map[lost[0]]} lacks tensor {lost[0]}, which {_INDEX_FILE} says it holds"
            )

    def _open(self, folder: Path, file: str, weight_map: Mapping[str, str]) -> None:
        try:
            header = safe_open(str(folder / file), framework="np")  # torch is loaded where something is read
        except SafetensorError as error:
            path = folder / file
            raise ValueError(f"{path} is not a whole safetensors file (truncated or damaged): {error}") from None
        self._paths[file] = str(folder / file)
        for name in header.keys():  # noqa: SIM118 - not a mapping
            if weight_map.get(name, file) != file:
                continue
            if name in self._file_of:
                raise ValueError(f"tensor {name} is in both {self._file_of[name]} and {file} of {self.path}")
            self._file_of[name] = file
            piece, known = header.get_slice(name), self._full_name(name)
            if known in self._shapes:
                raise ValueError(f"{self.path} holds {known} twice, with and without 'model.' before it")
            if (dtype := piece.get_dtype()) in _FLOATING:
                self._shapes[known] = tuple(piece.get_shape())
            else:
                self._unreadable[known] = f"{dtype}; supported are {', '.join(_FLOATING)}"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return MappingProxyType(self._shapes)

    @property
    def unreadable(self) -> Mapping[str, str]:
        return MappingProxyType(self._unreadable)

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        stored = self._stored_names.get(name, name)
        file = self._file_of[stored]
        if file not in self._files:
            self._files[file] = safe_open(self._paths[file], framework="pt")
        tensor: torch.Tensor = self._files[file].get_tensor(stored)
        return tensor[rows].to(dtype)

    def _full_name(self, stored: str) -> str:
        """The name in a model with a head of what is called `stored` here."""
        if not _BARE.match(stored):
            return stored
        name = f"model.{stored}"
        self._stored_names[name] = stored
        return name

    @property
    def files(self) -> list[str]:
        return sorted(self._paths.values())

    def close(self) -> None:
        self._files.clear()


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file of `folder` each tensor is to come from, by the index; empty where there is none."""
    index = folder / _INDEX_FILE
    if not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from None
    if not files or not all(isinstance(file, str) for file in files):
        raise ValueError(f"{index} is not a safetensors index: its weight_map does not map tensors to files")
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, which {_INDEX_FILE} lists")
    return dict(weight_map)


def _files_without_index(folder: Path) -> list[str]:
    """The single file, else all that are there."""
    if (folder / _SINGLE_FILE).is_file():
        return [_SINGLE_FILE]
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise FileNotFoundError(f"{folder} holds no safetensors file")
    return names
