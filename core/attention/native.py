"""The attention backend of the native kernels: paged attention over blocks laid out for the CPU's dot products."""

import ctypes

import torch

from ..kernels import library, memory
from ..kernels.header import NUMBERS
from .interface import AttentionBackend, AttentionMetadata

_BLOCK = NUMBERS["BLOCK"]


class NativeAttentionBackend(AttentionBackend):
    """Cache: [2, num_kv_heads, num_blocks * block_size / 16, 16 * head_dim]. With p values to 4 bytes, a block's keys
    lie as [head_dim / p, 16, p], its values as [16 / p, head_dim, p]."""

    name = "native"

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        block_size: int,
        dtype: torch.dtype,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, scale, block_size, dtype, sliding_window)
        self._metadata: AttentionMetadata | None = None
        self._step = library.Step()
        self._num_tokens = library.Int()

    @classmethod
    def supports(cls, head_dim: int, block_size: int, dtype: torch.dtype, group_size: int) -> bool:
        return (
            group_size <= NUMBERS["MAX_ROWS"]
            and head_dim % 16 == 0
            and head_dim <= NUMBERS["MAX_HEAD_DIM"]
            and block_size % _BLOCK == 0
            and dtype in (torch.bfloat16, torch.float32)
            and library.is_available()
        )

    @classmethod
    def bytes_per_block(cls, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
        return 2 * block_size * num_kv_heads * head_dim * dtype.itemsize

    def allocate(self, num_blocks: int) -> torch.Tensor:
        blocks = num_blocks * self.block_size // _BLOCK
        return memory.allocate((2, self.num_kv_heads, blocks, _BLOCK * self.head_dim), self.dtype)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        q, k, v = (_rows_of_heads(heads) for heads in (q, k, v))
        out = torch.empty(q.shape, dtype=self.dtype)
        self._enter_step(metadata)
        keys, values = kv_cache[0].data_ptr(), kv_cache[1].data_ptr()
        dtype = library.dtype_code(self.dtype)
        write = library.WriteKv(
            rows=ctypes.addressof(self._num_tokens),
            step=ctypes.addressof(self._step),
            k=k.data_ptr(),
            v=v.data_ptr(),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            k_cache=keys,
            v_cache=values,
            num_blocks=kv_cache.shape[2],
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )
        attend = library.Attention(
            step=ctypes.addressof(self._step),
            q=q.data_ptr(),
            q_stride=q.stride(0),
            k_cache=keys,
            v_cache=values,
            num_blocks=kv_cache.shape[2],
            out=out.data_ptr(),
            out_stride=out.stride(0),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            window=self.sliding_window or 0,
            dtype=dtype,
        )
        library.run(write, attend)
        return out

    def _enter_step(self, metadata: AttentionMetadata) -> None:
        """All layers of a step pass the same metadata: its addresses are taken once."""
        if metadata is self._metadata:
            return
        fill_step(self._step, metadata, self.block_size)
        self._num_tokens.value = metadata.num_tokens
        self._metadata = metadata


def fill_step(step: library.Step, metadata: AttentionMetadata, block_size: int) -> None:
    """Points `step` at the metadata's tensors, which must outlive its use."""
    step.num_reqs = metadata.num_reqs
    step.query_start_loc = metadata.query_start_loc.data_ptr()
    step.seq_lens = metadata.seq_lens.data_ptr()
    step.block_table = metadata.block_table.data_ptr()
    step.block_table_stride = metadata.block_table.stride(0)
    step.block_size = block_size
    step.positions = metadata.positions.data_ptr()
    step.slot_mapping = metadata.slot_mapping.data_ptr()


def _rows_of_heads(heads: torch.Tensor) -> torch.Tensor:
    """heads: [num_tokens, n, head_dim], each token's heads side by side; copied if they are not."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
