"""What a checkpoint looks like to the decoder: named tensors with Hugging Face names, read one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import torch

ALL_ROWS = slice(None)


class TensorSource(ABC):
    """An open checkpoint. Use as a context manager; what `read` returned stays valid after closing."""

    path: str

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the checkpoint under its Hugging Face name."""

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        """The tensor, or some of its rows, converted; it may share memory with the file and must not be written to."""

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
    """Raises ValueError naming every tensor that is missing, misshapen, or there without a use.

    `optional` names may be present; they are not read.
    """
    found = source.shapes
    missing = sorted(name for name in expected if name not in found)
    surplus = sorted(name for name in found if name not in expected and name not in optional)
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
