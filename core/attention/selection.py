"""Chooses the attention backend of the torch runtime, one for each kind of layer."""

import torch

from ..kernels import library
from ..models.spec import AttentionSpec
from .interface import AttentionBackend
from .native import NativeAttentionBackend
from .torch_backend import TorchAttentionBackend


def get_attention_backend(
    spec: AttentionSpec, block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The fastest that can attend so on this device."""
    native = device.type == "cpu" and library.is_available()
    if native and NativeAttentionBackend.obstacle(spec, block_size, dtype) is None:
        return NativeAttentionBackend(spec, block_size, dtype)
    return TorchAttentionBackend(spec, block_size, dtype, device)
