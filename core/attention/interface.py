"""What every attention backend does: own the layout of the paged KV cache, write keys and values, attend over block
tables. Runtimes have one for each kind of layer; the model runner builds the metadata once a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..dtypes import AnyDType, DType
from ..kernels.memory import Array
from ..lazy_torch import torch
from ..models.spec import AttentionSpec

KVCache = Any
"""One layer's cache. Only the backend that allocated it looks inside."""


A = TypeVar("A", bound=Array, covariant=True)


@dataclass(slots=True)
class AttentionMetadata(Generic[A]):
    """Where each token of the step stands. On the CPU, each request's tokens consecutive, one-token requests first.

    query_start_loc: [num_reqs + 1] int32, the first token of each request, then num_tokens.
    seq_lens: [num_reqs] int32, tokens of context after this step (computed before + scheduled now).
    block_table: [any number, max_blocks] int32; entries past a request's blocks are 0 (the null block) as far as the
        longest request's go, and mean nothing beyond, nor behind the window of layers that have one. It may be a view
        with a row stride larger than max_blocks; the last dimension is contiguous.
    table_rows: [num_reqs] int64, each request's row of the block table.
    slot_mapping: [num_tokens] int64, block_id * block_size + offset, where each token's key and value go.
    positions: [num_tokens] int64, each token's place in its sequence, from 0.
    num_decodes: the requests that bring exactly one token; they stand at the front. The others bring two or more.
    """

    query_start_loc: A
    seq_lens: A
    block_table: A
    table_rows: A
    slot_mapping: A
    positions: A
    max_query_len: int
    max_seq_len: int
    num_reqs: int
    num_tokens: int
    num_decodes: int


StepMetadata = tuple[AttentionMetadata[Array], ...]
"""A step's, one a KV group: they differ in `block_table` and `slot_mapping` alone."""


class AttentionBackend(ABC):
    """Attention of one kind of layer over a paged cache. Stateless but for its shape: caches are passed in.

    Query token at position p attends to the positions 0..p of its request, and with a window w only to p-w+1..p.
    Where the layer is bidirectional, to those behind p as well, with a window up to p+w-1; a request's tokens then come
    all in one step.
    """

    def __init__(self, spec: AttentionSpec, block_size: int, dtype: AnyDType) -> None:
        self.spec = spec
        self.block_size = block_size
        self.dtype = DType.of(dtype)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block of one layer takes, keys and values together."""
        return 2 * self.block_size * self.spec.kv_size * self.dtype.itemsize

    @abstractmethod
    def allocate(self, num_blocks: int) -> KVCache:
        """A cache of `num_blocks` blocks for one layer. Block 0 is the null block: read as padding, never written."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata[torch.Tensor],
    ) -> torch.Tensor:
        """Write k and v to their slots, then attend over the whole context.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; all of the engine's dtype,
        possibly strided views whose last dimension is contiguous. Returns [num_tokens, num_heads, head_dim],
        contiguous.
        """
