"""Buffers that kernels stream through: weights and KV caches, on huge pages where the system grants them."""

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ..lazy_torch import torch

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNMENT = 4096


class Buffer(np.ndarray[Any, np.dtype[Any]]):
    """An array that says by torch's names where it lies, so that kernels take either. bfloat16 stands in uint16."""

    if TYPE_CHECKING:

        def __getitem__(self, place: Any) -> "Buffer": ...

    def data_ptr(self) -> int:
        return self.ctypes.data

    def stride(self, dim: int) -> int:
        """In elements."""
        return self.strides[dim] // self.itemsize

    def tensor(self) -> "torch.Tensor":
        """The same memory."""
        tensor = torch.from_numpy(self.view(np.ndarray))
        return tensor.view(torch.bfloat16) if self.dtype == np.uint16 else tensor


Array: TypeAlias = "Buffer | torch.Tensor"


def as_buffer(array: "np.ndarray | torch.Tensor") -> Buffer:
    """Over the memory of an array, or of a tensor on the CPU."""
    if isinstance(array, np.ndarray):
        return array if isinstance(array, Buffer) else array.view(Buffer)
    return (array.view(torch.uint16) if array.dtype == torch.bfloat16 else array).numpy().view(Buffer)


def as_tensor(array: "np.ndarray | torch.Tensor") -> "torch.Tensor":
    """Over the memory of an array, of which uint16 is bfloat16; a tensor as it is."""
    return array.view(Buffer).tensor() if isinstance(array, np.ndarray) else array


Fill = Callable[[Buffer], None]
"""Writes a buffer's content into it."""


class Keep(Protocol):
    """Gives a buffer that lasts, with what `fill` writes into it, or wrote when this content was kept before.

    place: touches the buffer's pages, where new ones are taken, in the threads that will read them.
    """

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike, fill: Fill, place: Fill | None = None) -> Buffer: ...


def keep_new(shape: tuple[int, ...], dtype: DTypeLike, fill: Fill, place: Fill | None = None) -> Buffer:
    """In memory of its own."""
    buffer = allocate(shape, dtype)
    if place is not None:
        place(buffer)
    fill(buffer)
    return buffer


class _Chunk:
    """A region from which smaller buffers are cut, one behind the other. Lives as long as any of them."""

    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        buffer = np.frombuffer(pages, dtype=np.uint8).view(Buffer)
        self._free = buffer[-buffer.data_ptr() % _HUGE_PAGE :]

    def take(self, size: int) -> Buffer | None:
        """[size] uint8 of zeros, or None where so much is not left."""
        if size > self._free.shape[0]:
            return None
        taken, self._free = self._free[:size], self._free[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return taken


_chunk: _Chunk | None = None


@contextlib.contextmanager
def separate() -> Iterator[None]:
    """Begins an arena of its own for what is allocated within: freeing that gives the pages back to the system."""
    global _chunk
    _chunk = None
    try:
        yield
    finally:
        _chunk = None


def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
    """Zeros, 4 KiB aligned. Memory is taken when it is touched."""
    global _chunk
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size >= _CHUNK // 2:
        taken = _Chunk(size).take(size)
    else:
        taken = _chunk.take(size) if _chunk is not None else None
        if taken is None:
            _chunk = _Chunk(_CHUNK)
            taken = _chunk.take(size)
    assert taken is not None
    return taken.view(dtype).reshape(shape).view(Buffer)
