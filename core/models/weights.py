"""A decoder's weights, as data, and how they are read by a `WeightPlan`. Nothing is read as a whole: slabs of rows pass
through, so that a load needs little more than it leaves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F

from ..kernels.linear import BlockWeight
from .gguf import GGUFSource
from .linear import whole
from .spec import LayerSpec, ModelSpec
from .tensor_names import EMBEDDING, FINAL_NORM, expected_tensors, layer_prefix, optional_tensors
from .tensor_source import TensorSource, check_tensors
from .weight_plan import LayerPlan, MatrixPlan, WeightPlan

M = TypeVar("M")

PromptEmbeds = Sequence[tuple[int, torch.Tensor]]
"""(first token, [count, hidden_size] of any float type): what to take in place of those tokens' embeddings."""


@dataclass(slots=True)
class LayerWeights(Generic[M]):
    """`qkv` gives queries, keys and values side by side; `gate_up` the gate, then what it is multiplied with."""

    spec: LayerSpec
    qkv: M
    o: M
    gate_up: M
    down: M
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    attention_output_norm: torch.Tensor | None
    mlp_output_norm: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass
class DecoderWeights(Generic[M]):
    """embedding: [vocab_size, hidden_size], scaled, or blocks, whose rows are to be scaled; norms have their offset;
    matrices are as the runtime keeps them."""

    spec: ModelSpec
    dtype: torch.dtype
    embedding: torch.Tensor | BlockWeight
    layers: list[LayerWeights[M]]
    norm: torch.Tensor
    head: M | None

    def embed(self, token_ids: torch.Tensor, prompt_embeds: PromptEmbeds = ()) -> torch.Tensor:
        """token_ids: [num_tokens] int64. Returns [num_tokens, hidden_size]."""
        if isinstance(self.embedding, BlockWeight):
            hidden = self.embedding.lookup(token_ids, self.dtype, embed_factor(self.spec, self.dtype))
        else:
            hidden = F.embedding(token_ids, self.embedding)
        for first, embeds in prompt_embeds:
            hidden[first : first + embeds.shape[0]] = embeds
        return hidden


def embed_factor(spec: ModelSpec, dtype: torch.dtype) -> float:
    """What embeddings are multiplied with, as `dtype` rounds it."""
    return float(torch.tensor(spec.embed_scale, dtype=dtype))


def load_weights(plan: WeightPlan[M], source: TensorSource, device: torch.device | None = None) -> DecoderWeights[M]:
    """Raises ValueError naming the tensors that `source` lacks, has in excess, or has in another shape."""
    spec = plan.spec
    check_tensors(source, expected_tensors(spec), optional_tensors(spec))
    reader = _Reader(source, plan, device)
    head = None if plan.head is None else reader.matrix(plan.head)
    return DecoderWeights(
        spec=spec,
        dtype=plan.dtype,
        embedding=reader.embedding(head),
        layers=[reader.layer(index, layer) for index, layer in enumerate(plan.layers)],
        norm=reader.vector(FINAL_NORM),
        head=head,
    )


class _Reader(Generic[M]):
    def __init__(self, source: TensorSource, plan: WeightPlan[M], device: torch.device | None) -> None:
        self._source, self._plan, self._device = source, plan, device
        self._spec, self._dtype = plan.spec, plan.dtype

    def layer(self, index: int, plan: LayerPlan[M]) -> LayerWeights[M]:
        spec, prefix = self._spec.layers[index], layer_prefix(index)
        norms, qk_norm = spec.norms, spec.attention.qk_norm

        def norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else self.vector(f"{prefix}.{name}.weight")

        return LayerWeights(
            spec=spec,
            qkv=self.matrix(plan.qkv),
            o=self.matrix(plan.o),
            gate_up=self.matrix(plan.gate_up),
            down=self.matrix(plan.down),
            attention_norm=self.vector(f"{prefix}.{norms.attention}.weight"),
            mlp_norm=self.vector(f"{prefix}.{norms.mlp}.weight"),
            attention_output_norm=norm(norms.attention_output),
            mlp_output_norm=norm(norms.mlp_output),
            q_norm=norm("self_attn.q_norm" if qk_norm else None),
            k_norm=norm("self_attn.k_norm" if qk_norm else None),
        )

    def matrix(self, plan: MatrixPlan[M]) -> M:
        projection = plan.projection
        bias = None
        if projection.bias:
            bias = torch.cat([self._source.read(f"{name}.bias", self._dtype) for name in projection.names])
        names = [f"{name}.weight" for name in projection.names]
        return plan.build(_MergedRows(self._source, names, None if plan.from_blocks else self._dtype), bias)

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight; with its offset in float32, as bfloat16 would keep little of the weight beside that."""
        if offset := self._spec.norm_offset:
            return (self._source.read(name, torch.float32) + offset).to(self._device)
        return self._source.read(name, self._dtype).clone().to(self._device)

    def embedding(self, head: M | None) -> torch.Tensor | BlockWeight:
        if (plan := self._plan.embedding) is not None:
            blocks = head if plan is self._plan.head else self.matrix(plan)
            assert isinstance(blocks, BlockWeight)
            return blocks
        embedding = whole(_MergedRows(self._source, [EMBEDDING], self._dtype))
        if self._spec.embed_scale != 1.0:
            embedding *= embed_factor(self._spec, self._dtype)
        return embedding.to(self._device)


class _MergedRows:
    """Matrices of a checkpoint on top of one another, read a slice of rows at a time. Without a dtype: their blocks, as
    they lie in the file.
    """

    def __init__(self, source: TensorSource, names: Sequence[str], dtype: torch.dtype | None) -> None:
        self._source, self._names, self._dtype = source, names, dtype
        self._counts = [source.shapes[name][0] for name in names]
        width = source.shapes[names[0]][1] if dtype is not None else self._read(names[0], 0, 1).shape[1]
        self.shape = sum(self._counts), width

    def __getitem__(self, rows: slice) -> torch.Tensor:
        first, end, _ = rows.indices(self.shape[0])
        parts, start = [], 0
        for name, count in zip(self._names, self._counts, strict=True):
            own_first, own_end = max(first - start, 0), min(end - start, count)
            if own_first < own_end:
                parts.append(self._read(name, own_first, own_end))
            start += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, name: str, first: int, end: int) -> torch.Tensor:
        if self._dtype is not None:
            return self._source.read(name, self._dtype, slice(first, end))
        assert isinstance(self._source, GGUFSource)
        return self._source.read_blocks(name, slice(first, end))
