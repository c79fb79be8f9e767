"""A decoder's weights, as data, and how they are read by a `WeightPlan`. Nothing is read as a whole: slabs of rows pass
through, so that a load needs little more than it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..dtypes import DType
from ..kernels.linear import BLOCK_FORMATS, BlockWeight, Rows, slabs
from ..kernels.memory import Buffer, Keep, as_buffer, as_tensor, keep_new
from ..lazy_torch import torch
from .gguf import GGUFSource
from .spec import LayerSpec, ModelSpec
from .tensor_names import EMBEDDING, FINAL_NORM, expected_tensors, layer_prefix, optional_tensors
from .tensor_source import TensorSource, check_tensors
from .weight_plan import LayerPlan, MatrixPlan, WeightPlan

M = TypeVar("M")

PromptEmbeds = Sequence[tuple[int, "torch.Tensor"]]
"""(first token, [count, hidden_size] of any float type): what to take in place of those tokens' embeddings."""


Vector = Any
"""A runtime's own: a `Buffer`, or a tensor on its device."""


@dataclass(slots=True)
class LayerWeights(Generic[M]):
    """`qkv` gives queries, keys and values side by side; `gate_up` the gate, then what it is multiplied with."""

    spec: LayerSpec
    qkv: M
    o: M
    gate_up: M
    down: M
    attention_norm: Vector
    mlp_norm: Vector
    attention_output_norm: Vector | None
    mlp_output_norm: Vector | None
    q_norm: Vector | None
    k_norm: Vector | None


@dataclass
class DecoderWeights(Generic[M]):
    """embedding: [vocab_size, hidden_size], scaled, or blocks, whose rows are to be scaled; norms have their offset;
    matrices are as the runtime keeps them."""

    spec: ModelSpec
    dtype: DType
    embedding: Buffer | torch.Tensor | BlockWeight
    layers: list[LayerWeights[M]]
    norm: Vector
    head: M | None

    def embed(self, token_ids: torch.Tensor, prompt_embeds: PromptEmbeds = ()) -> torch.Tensor:
        """token_ids: [num_tokens] int64. Returns [num_tokens, hidden_size]."""
        if isinstance(self.embedding, BlockWeight):
            hidden = self.embedding.lookup(token_ids, self.dtype, embed_factor(self.spec, self.dtype))
        else:
            hidden = torch.nn.functional.embedding(token_ids, as_tensor(self.embedding))
        for first, embeds in prompt_embeds:
            hidden[first : first + embeds.shape[0]] = embeds
        return hidden


def embed_factor(spec: ModelSpec, dtype: DType) -> float:
    """What embeddings are multiplied with, as `dtype` rounds it."""
    return spec.embed_scale if spec.embed_scale == 1.0 else float(torch.tensor(spec.embed_scale, dtype=dtype.torch))


def load_weights(
    plan: WeightPlan[M], source: TensorSource, keep: Keep | None, device: torch.device | None = None
) -> DecoderWeights[M]:
    """keep: gives every buffer, always in the same order; None for tensors on `device`.

    Raises ValueError naming the tensors that `source` lacks, has in excess, or has in another shape."""
    spec = plan.spec
    check_tensors(source, expected_tensors(spec), optional_tensors(spec))
    reader = _Reader(source, plan, keep, device)
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
    def __init__(
        self, source: TensorSource, plan: WeightPlan[M], keep: Keep | None, device: torch.device | None
    ) -> None:
        self._source, self._plan, self._keep, self._device = source, plan, keep, device
        self._spec, self._dtype = plan.spec, plan.dtype

    def layer(self, index: int, plan: LayerPlan[M]) -> LayerWeights[M]:
        spec, prefix = self._spec.layers[index], layer_prefix(index)
        norms, qk_norm = spec.norms, spec.attention.qk_norm

        def norm(name: str | None) -> Vector | None:
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
        names = [f"{name}.weight" for name in projection.names]
        rows = _MergedRows(self._source, names, None if plan.from_blocks else self._dtype)
        biases = [f"{name}.bias" for name in projection.names]
        bias = _MergedRows(self._source, biases, self._dtype) if projection.bias else None
        return plan.build(rows, bias, keep=self._keep or keep_new)

    def vector(self, name: str) -> Vector:
        """A norm's weight; with its offset in float32, as bfloat16 would keep little of the weight beside that."""
        offset, dtype = self._spec.norm_offset, self._dtype
        if offset:
            return self._kept(_MergedRows(self._source, [name], DType.FLOAT32), lambda values: values + offset)
        return self._kept(_MergedRows(self._source, [name], dtype), lambda values: values.clone())

    def _kept(self, rows: _MergedRows, changed: Callable[[torch.Tensor], torch.Tensor]) -> Vector:
        """The rows, each slab of them `changed`."""
        assert rows.dtype is not None
        if self._keep is not None:
            return self._keep(tuple(rows.shape), rows.dtype.numpy, lambda out: _fill(as_buffer(out), rows, changed))
        tensor = torch.empty(*rows.shape, dtype=rows.dtype.torch)
        _fill(as_buffer(tensor), rows, changed)
        return tensor.to(self._device)

    def embedding(self, head: M | None) -> Buffer | torch.Tensor | BlockWeight:
        if (plan := self._plan.embedding) is not None:
            blocks = head if plan is self._plan.head else self.matrix(plan)
            assert isinstance(blocks, BlockWeight)
            return blocks
        factor = embed_factor(self._spec, self._dtype)
        rows = _MergedRows(self._source, [EMBEDDING], self._dtype)
        embedding: Buffer | torch.Tensor
        embedding = self._kept(rows, lambda values: values if factor == 1.0 else values * factor)
        return embedding


def _fill(out: Buffer, rows: Rows, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for first, slab in slabs(rows):
        out[first : first + slab.shape[0]] = as_buffer(changed(slab))


class _MergedRows:
    """Matrices, or vectors, of a checkpoint on top of one another, read a slice of rows at a time. Without a dtype:
    their blocks, as they lie in the file.
    """

    def __init__(self, source: TensorSource, names: Sequence[str], dtype: DType | None) -> None:
        self._source, self._names, self.dtype = source, names, dtype
        self._counts = [source.shapes[name][0] for name in names]
        width = source.shapes[names[0]][1:]
        if dtype is None:
            block = BLOCK_FORMATS[source.block_kinds[names[0]]]
            width = (width[0] // block.size * block.file_bytes,)
        self.shape = (sum(self._counts), *width)

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
        if self.dtype is not None:
            return self._source.read(name, self.dtype.torch, slice(first, end))
        assert isinstance(self._source, GGUFSource)
        return self._source.read_blocks(name, slice(first, end))
