"""The attention backend in plain torch: runs everywhere and is the reference for the native ones."""

import torch
import torch.nn.functional as F

from .interface import AttentionBackend, AttentionMetadata

_MAX_GATHERED_TOKENS = 1 << 16
"""Context tokens that decodes gather at once; bounds the scratch memory of a step."""


class TorchAttentionBackend(AttentionBackend):
    """Cache: one tensor [2, num_blocks, block_size, num_kv_heads, head_dim], keys then values."""

    name = "torch"

    @classmethod
    def supports(cls, head_dim: int, block_size: int, dtype: torch.dtype, group_size: int) -> bool:
        return True

    @classmethod
    def bytes_per_block(cls, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
        return 2 * block_size * num_kv_heads * head_dim * dtype.itemsize

    def allocate(self, num_blocks: int) -> torch.Tensor:
        return torch.zeros(2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim, dtype=self.dtype)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        keys, values = kv_cache.flatten(1, 2)
        keys.index_copy_(0, metadata.slot_mapping, k)
        values.index_copy_(0, metadata.slot_mapping, v)
        out = torch.empty(q.shape, dtype=q.dtype)
        num_decodes = metadata.num_decodes
        self._decode(q[:num_decodes], kv_cache, metadata, out)
        starts = metadata.query_start_loc[num_decodes:].tolist()
        seq_lens = metadata.seq_lens[num_decodes:].tolist()
        for row, (start, end, seq_len) in enumerate(zip(starts, starts[1:], seq_lens, strict=False), num_decodes):
            block_table = metadata.block_table[row]
            out[start:end] = self._attend_chunk(q[start:end], kv_cache, block_table, seq_len)
        return out

    def _decode(self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        """One query token a request, requests grouped so that the gathered contexts stay within bounds."""
        num_decodes = metadata.num_decodes
        start = 0
        while start < num_decodes:
            longest = int(metadata.seq_lens[start:num_decodes].max())
            end = min(num_decodes, start + max(1, _MAX_GATHERED_TOKENS // longest))
            self._attend_decodes(
                q[start:end], kv_cache, metadata.block_table[start:end], metadata.seq_lens[start:end], out[start:end]
            )
            start = end

    def _attend_decodes(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """q, out: [n, num_heads, head_dim]; block_table: [n, max_blocks]; seq_lens: [n]."""
        n = q.shape[0]
        num_blocks = -(-int(seq_lens.max()) // self.block_size)
        blocks = block_table[:, :num_blocks]
        shape = (n, num_blocks * self.block_size, self.num_kv_heads, self.head_dim)
        keys = kv_cache[0][blocks].view(shape).transpose(1, 2)
        values = kv_cache[1][blocks].view(shape).transpose(1, 2)
        places = torch.arange(shape[1])
        visible = places < seq_lens[:, None]
        if self.sliding_window is not None:
            visible &= places >= (seq_lens - self.sliding_window)[:, None]
        grouped = q.reshape(n, self.num_kv_heads, -1, self.head_dim)
        attended = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=visible[:, None, None, :], scale=self.scale
        )
        out.copy_(attended.reshape(out.shape))

    def _attend_chunk(
        self, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int
    ) -> torch.Tensor:
        """One request's consecutive query tokens, the last of them at position seq_len - 1.

        q: [query_len, num_heads, head_dim]; block_table: [max_blocks]. Returns the shape of q.
        """
        query_len = q.shape[0]
        first_block = 0
        if self.sliding_window is not None:
            first_block = max(0, seq_len - query_len - self.sliding_window + 1) // self.block_size
        blocks = block_table[first_block : -(-seq_len // self.block_size)]
        base = first_block * self.block_size
        keys, values = (
            kv_cache[side][blocks].flatten(0, 1)[: seq_len - base].transpose(0, 1).unsqueeze(0) for side in (0, 1)
        )
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=self._causal_mask(query_len, seq_len, base),
            is_causal=query_len == seq_len and self.sliding_window is None,
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return attended[0].transpose(0, 1)

    def _causal_mask(self, query_len: int, seq_len: int, base: int) -> torch.Tensor | None:
        """[query_len, seq_len - base] bool, true where the query may look; None for the plain causal square."""
        if query_len == seq_len and self.sliding_window is None:
            return None
        query_places = torch.arange(seq_len - query_len, seq_len)[:, None]
        key_places = torch.arange(base, seq_len)[None, :]
        visible = key_places <= query_places
        if self.sliding_window is not None:
            visible &= key_places > query_places - self.sliding_window
        return visible
