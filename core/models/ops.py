"""A decoder's small operations in torch: what the reference runtime computes, and the reference of the native kernels.

Tensors are of the engine's dtype; sums of squares are taken in float32.
"""

from __future__ import annotations

from ..lazy_torch import torch
from .spec import Activation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size]; weight: [size], of the dtype in which it multiplies: what is normalised is rounded to that.
    Returns the shape and dtype of x."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def gated(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """gate_up: [num_tokens, 2 * size], gate first. Returns activation(gate) * up, [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (
        torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    ).mul_(up)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads: [num_tokens, num_heads, head_dim]; cos and sin as `rotary_tables` gives them, for the first channels."""
    rotary_dim = cos.shape[-1]
    turning, still = heads[..., :rotary_dim], heads[..., rotary_dim:]
    half = rotary_dim // 2
    swapped = torch.cat((turning[..., half:], turning[..., :half]), dim=-1)
    turned = (turning * cos).add_(swapped.mul_(sin))
    return turned if not still.shape[-1] else torch.cat((turned, still), dim=-1)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """In place."""
    return x.div_(cap).tanh_().mul_(cap)
