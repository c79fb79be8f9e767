"""Large buffers that kernels stream through: weights and KV caches, on huge pages where the system grants them."""

import math
import mmap

import torch

_HUGE_PAGE = 2 << 20


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros, 64-byte aligned. From 2 MiB on it starts on a huge page, and memory is taken when touched."""
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    start = -buffer.data_ptr() % _HUGE_PAGE
    return buffer[start : start + size].view(dtype).view(shape)
