"""The attention backend in plain torch: runs everywhere and is the reference for the native ones."""

import torch
import torch.nn.functional as F

from ..dtypes import AnyDType
from ..models.ops import softcap
from ..models.spec import AttentionSpec
from .interface import AttentionBackend, AttentionMetadata

_MAX_GATHERED_TOKENS = 1 << 16
"""Context tokens that decodes gather at once; bounds the scratch memory of a step."""


class TorchAttentionBackend(AttentionBackend):
    """Cache: one tensor [2, num_blocks, block_size, num_kv_heads, head_dim], keys then values."""

    def __init__(
        self, spec: AttentionSpec, block_size: int, dtype: AnyDType, device: torch.device | None = None
    ) -> None:
        super().__init__(spec, block_size, dtype)
        self.device = device

    def allocate(self, num_blocks: int) -> torch.Tensor:
        shape = (2, num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        return torch.zeros(shape, dtype=self.dtype.torch, device=self.device)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata[torch.Tensor],
    ) -> torch.Tensor:
        keys, values = kv_cache.flatten(1, 2)
        keys.index_copy_(0, metadata.slot_mapping, k)
        values.index_copy_(0, metadata.slot_mapping, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_decodes = metadata.num_decodes
        self._decode(q[:num_decodes], kv_cache, metadata, out)
        starts = metadata.query_start_loc[num_decodes:].tolist()
        seq_lens = metadata.seq_lens[num_decodes:].tolist()
        for row, (start, end, seq_len) in enumerate(zip(starts, starts[1:], seq_lens, strict=False), num_decodes):
            block_table = metadata.block_table[metadata.table_rows[row]]
            out[start:end] = self._attend_chunk(q[start:end], kv_cache, block_table, seq_len)
        return out

    def _decode(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata[torch.Tensor], out: torch.Tensor
    ) -> None:
        """One query token a request, requests grouped so that the gathered contexts stay within bounds."""
        num_decodes = metadata.num_decodes
        start = 0
        while start < num_decodes:
            longest = int(metadata.seq_lens[start:num_decodes].max())
            end = min(num_decodes, start + max(1, _MAX_GATHERED_TOKENS // longest))
            block_table = metadata.block_table[metadata.table_rows[start:end]]
            self._attend_decodes(q[start:end], kv_cache, block_table, metadata.seq_lens[start:end], out[start:end])
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
        spec, n = self.spec, q.shape[0]
        longest = int(seq_lens.max())
        window = spec.window or longest
        num_blocks = -(-longest // self.block_size)
        width = min(num_blocks, (window + self.block_size - 2) // self.block_size + 1)  # blocks that a window touches
        lowest = (seq_lens - window).clamp_(min=0)
        columns = (lowest // self.block_size)[:, None] + torch.arange(width, device=q.device)
        blocks = block_table.gather(1, columns.clamp(max=num_blocks - 1))
        shape = (n, width * self.block_size, spec.num_kv_heads, spec.head_dim)
        keys = kv_cache[0][blocks].view(shape).transpose(1, 2)
        values = kv_cache[1][blocks].view(shape).transpose(1, 2)
        places = columns[:, :1] * self.block_size + torch.arange(shape[1], device=q.device)
        visible = (places >= lowest[:, None]) & (places < seq_lens[:, None])
        grouped = q.reshape(n, spec.num_kv_heads, -1, spec.head_dim)
        out.copy_(self._attend(grouped, keys, values, visible[:, None, None, :]).reshape(out.shape))

    def _attend_chunk(
        self, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int
    ) -> torch.Tensor:
        """One request's consecutive query tokens, the last of them at position seq_len - 1.

        q: [query_len, num_heads, head_dim]; block_table: [max_blocks]. Returns the shape of q.
        """
        query_len, window = q.shape[0], self.spec.window
        first_block = 0
        if window is not None:
            first_block = max(0, seq_len - query_len - window + 1) // self.block_size
        blocks = block_table[first_block : -(-seq_len // self.block_size)]
        base = first_block * self.block_size
        keys, values = (
            kv_cache[side][blocks].flatten(0, 1)[: seq_len - base].transpose(0, 1).unsqueeze(0) for side in (0, 1)
        )
        mask = self._mask(query_len, seq_len, base, q.device)
        return self._attend(q.transpose(0, 1).unsqueeze(0), keys, values, mask)[0].transpose(0, 1)

    def _mask(self, query_len: int, seq_len: int, base: int, device: torch.device) -> torch.Tensor | None:
        """[query_len, seq_len - base] bool, true where the query may look; None for the plain causal square."""
        window, bidirectional = self.spec.window, self.spec.bidirectional
        if query_len == seq_len and window is None and self.spec.softcap is None and not bidirectional:
            return None
        query_places = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
        key_places = torch.arange(base, seq_len, device=device)[None, :]
        visible = (key_places <= query_places) | bidirectional
        if window is not None:
            visible &= (key_places - query_places).abs() < window
        return visible

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """q: [n, heads, queries, head_dim]; keys, values: [n, kv_heads, places, head_dim]; visible: broadcast to
        [n, heads, queries, places]; None: the causal square. Returns the shape of q."""
        spec = self.spec
        if spec.softcap is None:
            return F.scaled_dot_product_attention(
                q,
                keys,
                values,
                attn_mask=visible,
                is_causal=visible is None,
                scale=spec.scale,
                enable_gqa=q.shape[1] != keys.shape[1],
            )
        assert visible is not None
        keys, values = (heads.repeat_interleave(q.shape[1] // keys.shape[1], dim=1) for heads in (keys, values))
        scores = softcap((q @ keys.transpose(-1, -2)).float() * spec.scale, spec.softcap)
        return scores.masked_fill_(~visible, -torch.inf).softmax(-1).to(q.dtype) @ values
