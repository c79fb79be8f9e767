"""The attention backend of the native kernels: paged attention over blocks laid out for the CPU's dot products."""

from __future__ import annotations

import ctypes

from ..dtypes import AnyDType, DType
from ..kernels import library, memory
from ..kernels.header import NUMBERS
from ..kernels.memory import Array, Buffer
from ..lazy_torch import torch
from ..models.spec import AttentionSpec
from .interface import AttentionBackend, AttentionMetadata

_BLOCK = NUMBERS["BLOCK"]


class NativeAttentionBackend(AttentionBackend):
    """Cache: [2, num_kv_heads, num_blocks * block_size / 16, 16 * head_dim]. With p values to 4 bytes, a block's keys
    lie as [head_dim / p, 16, p], its values as [16 / p, head_dim, p]."""

    def __init__(self, spec: AttentionSpec, block_size: int, dtype: AnyDType) -> None:
        super().__init__(spec, block_size, dtype)
        self._metadata: AttentionMetadata[Array] | None = None
        self._step = library.Step()
        self._num_tokens = library.Int()

    @staticmethod
    def obstacle(spec: AttentionSpec, block_size: int, dtype: AnyDType) -> str | None:
        """Why the kernels cannot attend so; None where they can."""
        if block_size % _BLOCK:
            return f"block_size is {block_size}; use a multiple of {_BLOCK}"
        if DType.of(dtype) is DType.FLOAT16:
            return f"dtype is {DType.of(dtype)}; use dtype='bfloat16'"
        widest, most = NUMBERS["MAX_HEAD_DIM"], NUMBERS["MAX_ROWS"]
        if spec.head_dim % 16 or spec.head_dim > widest or spec.num_heads > most * spec.num_kv_heads:
            return (
                f"no native kernel attends with head_dim {spec.head_dim} and {spec.num_heads} heads over "
                f"{spec.num_kv_heads} key/value heads: head_dim must be a multiple of 16 and at most {widest}, and "
                f"{most} heads at most may share a key/value head"
            )
        return None

    def allocate(self, num_blocks: int) -> Buffer:
        blocks = num_blocks * self.block_size // _BLOCK
        return memory.allocate((2, self.spec.num_kv_heads, blocks, _BLOCK * self.spec.head_dim), self.dtype.numpy)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: Buffer,
        metadata: AttentionMetadata[torch.Tensor],
    ) -> torch.Tensor:
        q, k, v = (_rows_of_heads(heads) for heads in (q, k, v))
        out = torch.empty(q.shape, dtype=self.dtype.torch)
        self._enter_step(metadata)
        write = library.WriteKv(
            rows=ctypes.addressof(self._num_tokens),
            step=ctypes.addressof(self._step),
            k=k.data_ptr(),
            v=v.data_ptr(),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            k_cache=kv_cache[0].data_ptr(),
            v_cache=kv_cache[1].data_ptr(),
            num_blocks=kv_cache.shape[2],
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=library.dtype_code(self.dtype),
        )
        library.run(write, self.operation(self._step, q, kv_cache, out))
        return out

    def operation(self, step: library.Step, q: Array, kv_cache: Buffer, out: Array) -> library.Attention:
        """Attends with what is in the cache. q, out: [num_tokens, ...], each token's heads side by side."""
        spec = self.spec
        return library.Attention(
            step=ctypes.addressof(step),
            q=q.data_ptr(),
            q_stride=q.stride(0),
            k_cache=kv_cache[0].data_ptr(),
            v_cache=kv_cache[1].data_ptr(),
            num_blocks=kv_cache.shape[2],
            out=out.data_ptr(),
            out_stride=out.stride(0),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            window=spec.window or 0,
            bidirectional=spec.bidirectional,
            dtype=library.dtype_code(self.dtype),
        )

    def _enter_step(self, metadata: AttentionMetadata[Array]) -> None:
        """All layers of a step pass the same metadata: its addresses are taken once."""
        if metadata is self._metadata:
            return
        fill_step(self._step, metadata, self.block_size)
        self._num_tokens.value = metadata.num_tokens
        self._metadata = metadata


def fill_step(step: library.Step, metadata: AttentionMetadata[Array], block_size: int) -> None:
    """Points `step` at the metadata's arrays, which must outlive its use."""
    step.num_reqs = metadata.num_reqs
    step.query_start_loc = metadata.query_start_loc.data_ptr()
    step.seq_lens = metadata.seq_lens.data_ptr()
    step.block_table = metadata.block_table.data_ptr()
    step.table_rows = metadata.table_rows.data_ptr()
    step.block_table_stride = metadata.block_table.stride(0)
    step.block_size = block_size
    step.positions = metadata.positions.data_ptr()
    step.slot_mapping = metadata.slot_mapping.data_ptr()


def _rows_of_heads(heads: torch.Tensor) -> torch.Tensor:
    """heads: [num_tokens, n, head_dim], each token's heads side by side; copied if they are not."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
