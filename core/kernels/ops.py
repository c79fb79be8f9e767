"""Single operations of the native kernels on torch tensors, for models that run layer by layer and for the tests."""

import ctypes

import torch

from . import library


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size] bfloat16 or float32, size a multiple of 16. Returns its shape."""
    x = x.contiguous()
    return _rms_norm(None, x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. Both [num_tokens, size], contiguous."""
    return _rms_norm(x, residual, weight, eps)


def _rms_norm(x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(residual)
    size = residual.shape[-1]
    rows = library.Int(residual.numel() // size)
    library.run(
        library.RmsNorm(
            rows=ctypes.addressof(rows),
            x=None if x is None else x.data_ptr(),
            residual=residual.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            size=size,
            eps=eps,
            dtype=library.dtype_code(residual.dtype),
        )
    )
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [num_tokens, 2 * size] contiguous, gate first. Returns [num_tokens, size]."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    rows = library.Int(out.shape[0])
    library.run(
        library.SiluMul(
            rows=ctypes.addressof(rows),
            gate_up=gate_up.data_ptr(),
            out=out.data_ptr(),
            size=out.shape[1],
            dtype=library.dtype_code(gate_up.dtype),
        )
    )
    return out
