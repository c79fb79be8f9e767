"""Models described by hand-made specs, their tensors in memory, and their logits from any runtime."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from corespan.core.attention.interface import AttentionMetadata, StepMetadata
from corespan.core.kernels.memory import as_tensor
from corespan.core.models.spec import ModelSpec
from corespan.core.models.tensor_names import expected_tensors
from corespan.core.models.tensor_source import ALL_ROWS, TensorSource
from corespan.core.runtime.interface import Runtime

BLOCK_SIZE = 16


@dataclass
class TensorDict(TensorSource):
    tensors: Mapping[str, torch.Tensor]
    path: str = "memory"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return self.tensors[name][rows].to(dtype)

    def close(self) -> None:
        pass


def random_tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in expected_tensors(spec).items()}
    return {name: tensor * 0.3 + ("norm" in name) for name, tensor in tensors.items()}


def load(runtime: Runtime[Any], tensors: Mapping[str, torch.Tensor], num_blocks: int = 16) -> None:
    source = TensorDict(tensors)
    runtime.load(runtime.plan(source), source)
    runtime.allocate_kv(num_blocks)


@torch.inference_mode()
def logits_of(runtime: Runtime[Any], token_ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Of every position, [len(token_ids), vocab], computed chunk by chunk."""
    found, first = [], 0
    for chunk in chunks:
        ids = torch.tensor(token_ids[first : first + chunk])
        hidden = runtime.forward(ids, metadata_of_one(first, chunk, len(runtime.kv_groups)))
        found.append(as_tensor(runtime.logits(hidden)).clone())
        first += chunk
    return torch.cat(found)


def metadata_of_one(first: int, count: int, num_groups: int = 1) -> StepMetadata:
    """A step of one request, whose blocks lie in order behind the null block, those of the KV groups by turns."""
    end = first + count
    positions = torch.arange(first, end)
    tables = [
        torch.arange(-(-end // BLOCK_SIZE), dtype=torch.int32) * num_groups + group + 1 for group in range(num_groups)
    ]
    return tuple(
        AttentionMetadata(
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=table[None],
            table_rows=torch.zeros(1, dtype=torch.int64),
            slot_mapping=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            positions=positions,
            max_query_len=count,
            max_seq_len=end,
            num_reqs=1,
            num_tokens=count,
            num_decodes=int(count == 1),
        )
        for table in tables
    )
