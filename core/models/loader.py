"""Opens checkpoints: safetensors files, single or sharded, and GGUF. The worker calls `open_checkpoint`."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from .gguf import GGUFSource
from .tensor_source import ALL_ROWS, TensorSource

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOATING = ("BF16", "F16", "F32")


def open_checkpoint(path: str) -> TensorSource:
    """`path`: a GGUF file or a folder with safetensors. Raises ValueError or FileNotFoundError naming the file."""
    return SafetensorsSource(path) if Path(path).is_dir() else GGUFSource(path)


class SafetensorsSource(TensorSource):
    """The safetensors files of a folder, memory-mapped; tensors of the dtype asked for are views into the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._files: dict[str, safe_open] = {}
        self._file_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        folder = Path(path)
        for name in _safetensors_files(folder):
            self._open(folder / name)

    def _open(self, file: Path) -> None:
        try:
            opened = safe_open(str(file), framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file (truncated or damaged): {error}") from None
        self._files[file.name] = opened
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            if name in self._file_of:
                raise ValueError(f"tensor {name} is in both {self._file_of[name]} and {file.name} of {self.path}")
            piece = opened.get_slice(name)
            dtype = piece.get_dtype()
            if dtype not in _FLOATING:
                raise ValueError(f"tensor {name} in {file} is {dtype}; supported are {', '.join(_FLOATING)}")
            self._file_of[name] = file.name
            self._shapes[name] = tuple(piece.get_shape())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return MappingProxyType(self._shapes)

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor[rows].to(dtype)

    def close(self) -> None:
        self._files.clear()


def _safetensors_files(folder: Path) -> list[str]:
    """File names in `folder` that together hold the checkpoint: those of the index, else the single file, else all."""
    index = folder / _INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, which {_INDEX_FILE} lists")
        return names
    if (folder / _SINGLE_FILE).is_file():
        return [_SINGLE_FILE]
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise FileNotFoundError(f"{folder} holds no safetensors file")
    return names
