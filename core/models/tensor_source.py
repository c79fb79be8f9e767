"""What a checkpoint looks like to the decoder: named tensors with Hugging Face names, read one at a time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

from ..lazy_torch import torch

ALL_ROWS = slice(None)

_ROTARY_CACHE = re.compile(r"(.+\.)?(rotary\w*(\..+)?|rope\.freqs|freqs_cis|inv_freq|(cos|sin)_cached?)")
"""Frequencies and their cosines, which the config implies and old checkpoints carry, under every framework's names."""
_INTEGER = re.compile(r"[IU]\d+|BOOL")  # safetensors' names of dtypes that no weight can have


class TensorSource(ABC):
    """An open checkpoint. Use as a context manager; what `read` returned stays valid after closing."""

    path: str

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the checkpoint that can be read, under its Hugging Face name."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Tensors of other dtypes, such as integer and boolean buffers, and why they cannot be read."""
        return {}

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        """The tensor, or some of its rows, converted; it may share memory with the file and must not be written to."""

    @property
    def files(self) -> Sequence[str]:
        """The paths of all files that tensors are read from; none where there are no files."""
        return ()

    @property
    def block_kinds(self) -> Mapping[str, str]:
        """The names of the formats of tensors that lie in blocks, where the file has such (GGUF)."""
        return {}

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_tensors(
    source: TensorSource, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str] = frozenset()
) -> None:
    """Raises ValueError naming every tensor that is missing, misshapen, of a wrong dtype, or there without a use.

    `optional` names may be present, and so may rotary caches and buffers of integers or booleans, such as masks and
    positions; they are not read.
    """
    found, unreadable = source.shapes, source.unreadable
    for name in expected:
        if name in unreadable:
            raise ValueError(f"tensor {name} in {source.path} is {unreadable[name]}")
    missing = sorted(name for name in expected if name not in found)
    unknown = [*found, *(name for name, dtype in unreadable.items() if not _INTEGER.match(dtype))]
    allowed = expected.keys() | optional
    surplus = sorted(name for name in unknown if name not in allowed and not _ROTARY_CACHE.fullmatch(name))
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    faults = [
        f"{kind}: {_listing(names)}"
        for kind, names in (("missing", missing), ("unexpected", surplus), ("misshapen", misshapen))
        if names
    ]
    if faults:
        raise ValueError(f"{source.path} does not hold the model its config describes; {'; '.join(faults)}")


def _listing(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
