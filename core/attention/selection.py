"""Chooses the attention backend. Called once, by the model runner."""

import torch

from .interface import AttentionBackend
from .native import NativeAttentionBackend
from .torch_backend import TorchAttentionBackend


def get_attention_backend(
    head_dim: int, block_size: int, dtype: torch.dtype, group_size: int
) -> type[AttentionBackend]:
    """The fastest backend that can run these shapes on this machine; `group_size` query heads share a kv head."""
    backends: tuple[type[AttentionBackend], ...] = (NativeAttentionBackend, TorchAttentionBackend)
    return next(backend for backend in backends if backend.supports(head_dim, block_size, dtype, group_size))
