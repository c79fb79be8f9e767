"""The decoder's small operations in torch. `Decoder` calls them through one `TorchOps` object, which native kernels may
subclass and override one by one."""

import torch
import torch.nn.functional as F


class TorchOps:
    """Reference operations. Tensors are of the engine's dtype; sums of squares are taken in float32."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x: [..., size]; weight: [size]. Returns the shape of x."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).to(x.dtype).mul_(weight)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x to `residual` in place and returns the norm of the sum. Both [num_tokens, size]."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [num_tokens, 2 * size], gate first. Returns [num_tokens, size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """heads: [num_tokens, num_heads, head_dim], cos and sin as `rotary_tables` gives them."""
        half = heads.shape[-1] // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
        return (heads * cos).add_(swapped.mul_(sin))
