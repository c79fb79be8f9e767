"""Buffers that kernels stream through: weights and KV caches, on huge pages where the system grants them."""

import contextlib
import math
import mmap
from collections.abc import Iterator

import torch

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNMENT = 4096


class _Chunk:
    """A region from which smaller buffers are cut, one behind the other. Lives as long as any of them."""

    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        self._free = buffer[-buffer.data_ptr() % _HUGE_PAGE :]

    def take(self, size: int) -> torch.Tensor | None:
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


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros, 4 KiB aligned. Memory is taken when it is touched."""
    global _chunk
    size = math.prod(shape) * dtype.itemsize
    if size >= _CHUNK // 2:
        taken = _Chunk(size).take(size)
    else:
        taken = _chunk.take(size) if _chunk is not None else None
        if taken is None:
            _chunk = _Chunk(_CHUNK)
            taken = _chunk.take(size)
    assert taken is not None
    return taken.view(dtype).view(shape)
