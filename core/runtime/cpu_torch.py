"""The runtime in plain torch: computes everything that a `ModelSpec` can say, layer by layer. The reference for the
others, and what serves where none of them takes the model."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from ..attention.interface import AttentionBackend, AttentionMetadata, StepMetadata
from ..attention.native import NativeAttentionBackend
from ..attention.torch_backend import TorchAttentionBackend
from ..dtypes import AnyDType
from ..kernels import library
from ..kernels.linear import Rows, loading_bytes
from ..kernels.memory import Array, Keep, as_tensor
from ..lora.adapter import ATTENTION_OUT, DOWN, GATE_UP, PARTS_A_LAYER, QKV, AdapterRows, delta
from ..models import ops
from ..models.linear import DenseLinear, Int8Linear, Linear, PackedLinear
from ..models.rotary import inverse_frequencies, rotary_tables
from ..models.spec import AttentionSpec, ModelSpec, RotarySpec
from ..models.tensor_names import Projection, layer_projections
from ..models.tensor_source import TensorSource
from ..models.weight_plan import Kinds, MatrixPlan, WeightPlan
from ..models.weights import DecoderWeights, LayerWeights, PromptEmbeds, load_weights
from .interface import Runtime

CPU = torch.device("cpu")

Rotary = tuple[torch.Tensor, torch.Tensor] | None


def get_attention_backend(
    spec: AttentionSpec, block_size: int, dtype: AnyDType, device: torch.device = CPU
) -> AttentionBackend:
    """The fastest that can attend so on this device."""
    native = device.type == "cpu" and library.is_available()
    if native and NativeAttentionBackend.obstacle(spec, block_size, dtype) is None:
        return NativeAttentionBackend(spec, block_size, dtype)
    return TorchAttentionBackend(spec, block_size, dtype, device)


def _built(make: Callable[[Rows, torch.Tensor | None], Linear], weight: Rows, bias: Rows | None, keep: Keep) -> Linear:
    return make(weight, None if bias is None else bias[0 : bias.shape[0]])


class TorchRuntime(Runtime[Linear]):
    """See `Runtime`. Tensors are on `device`; attention runs on native kernels where they take its shape."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: AnyDType,
        block_size: int,
        quantization: str | None = None,
        device: torch.device = CPU,
    ) -> None:
        attention = [get_attention_backend(layer.attention, block_size, dtype, device) for layer in spec.layers]
        super().__init__(spec, dtype, quantization, attention)
        self.device = device
        rotaries = {layer.attention.rotary for layer in spec.layers}
        firsts = (QKV, ATTENTION_OUT, GATE_UP, DOWN)
        self._sizes = [
            {first: each.rows for first, each in zip(firsts, layer_projections(spec, index), strict=True)}
            for index in range(len(spec.layers))
        ]
        self._frequencies = {rotary: inverse_frequencies(rotary).to(device) for rotary in rotaries if rotary}

    def _plan_matrix(self, projection: Projection, kinds: Kinds) -> MatrixPlan[Linear]:
        rows, columns = projection.shape
        slab = loading_bytes(rows, columns)
        if self.quantization == "int8":
            return MatrixPlan(projection, partial(_built, Int8Linear), rows * (columns + 4), slab)
        num_bytes = rows * columns * self.dtype.itemsize
        if self.device.type == "cpu" and PackedLinear.supports(self.dtype.torch):
            return MatrixPlan(projection, partial(_built, PackedLinear), num_bytes, num_bytes + slab)
        build = partial(_built, partial(DenseLinear, device=self.device))
        return MatrixPlan(projection, build, num_bytes, slab)

    @torch.inference_mode()
    def _load(self, plan: WeightPlan[Linear], source: TensorSource, num_positions: int) -> DecoderWeights[Linear]:
        return load_weights(plan, source, None, self.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: np.ndarray | torch.Tensor,
        metadata: StepMetadata,
        output_rows: np.ndarray | torch.Tensor | None = None,
        prompt_embeds: PromptEmbeds = (),
        adapters: Sequence[AdapterRows] = (),
    ) -> torch.Tensor:
        weights = self._loaded()
        groups = [self._on_device(each) for each in metadata]
        hidden = weights.embed(as_tensor(token_ids).to(self.device), prompt_embeds)
        output_rows = None if output_rows is None else as_tensor(output_rows)
        tables: dict[RotarySpec | None, Rotary] = {
            rotary: rotary_tables(frequencies, groups[0].positions, self.dtype.torch)
            for rotary, frequencies in self._frequencies.items()
        }
        last = len(weights.layers) - 1
        update: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            normed = self._norm_after(update, hidden, layer.attention_norm)
            qkv = self._product(layer.qkv, normed, adapters, index, QKV)
            q, k, v = self._queries_keys_values(layer, qkv, tables.get(layer.spec.attention.rotary))
            group = groups[self.kv_layout.group_of[index]]
            attended = self.attention[index].forward(q, k, v, self.kv_caches[index], group)
            update = attended.view(len(attended), -1)
            if index == last and output_rows is not None:
                update, hidden = update[output_rows], hidden[output_rows]
                adapters = [(adapter, torch.isin(output_rows, rows).nonzero()[:, 0]) for adapter, rows in adapters]
            update = self._product(layer.o, update, adapters, index, ATTENTION_OUT)
            update = self._normed(update, layer.attention_output_norm)
            normed = self._norm_after(update, hidden, layer.mlp_norm)
            gated = ops.gated(self._product(layer.gate_up, normed, adapters, index, GATE_UP), layer.spec.mlp.activation)
            update = self._product(layer.down, gated, adapters, index, DOWN)
            update = self._normed(update, layer.mlp_output_norm)
        return hidden if update is None else hidden.add_(update)

    @torch.inference_mode()
    def logits(self, hidden: Array) -> torch.Tensor:
        weights = self._loaded()
        assert weights.head is not None
        logits = weights.head(ops.rms_norm(as_tensor(hidden), weights.norm, self.spec.rms_norm_eps)).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else ops.softcap(logits, cap)

    def _product(
        self, matrix: Linear, x: torch.Tensor, adapters: Sequence[AdapterRows], layer: int, first: int
    ) -> torch.Tensor:
        """With what adapters add to it; `first`: with which of the layer's matrices it begins."""
        y = matrix(x)
        if not adapters:
            return y
        added = delta(adapters, layer * PARTS_A_LAYER + first, self._sizes[layer][first], x)
        return (y.float() + added).to(y.dtype)

    def _queries_keys_values(
        self, layer: LayerWeights[Linear], qkv: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv: [num_tokens, qkv_size]. Returns the heads of each, [num_tokens, n, head_dim]."""
        spec = layer.spec.attention
        num_rotated = spec.num_heads + spec.num_kv_heads
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        rotated, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rotated.split((spec.num_heads, spec.num_kv_heads), dim=1)
            eps = self.spec.rms_norm_eps
            rotated = torch.cat((ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)), dim=1)
        if rotary is not None:
            rotated = ops.rotate(rotated, *rotary)
        q, k = rotated.split((spec.num_heads, spec.num_kv_heads), dim=1)
        return q, k, v

    def _norm_after(self, update: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Adds what the part before gave, in place, and returns the norm of the sum."""
        if update is not None:
            residual.add_(update)
        return ops.rms_norm(residual, weight, self.spec.rms_norm_eps)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else ops.rms_norm(x, weight, self.spec.rms_norm_eps)

    def _on_device(self, metadata: AttentionMetadata[Array]) -> AttentionMetadata[torch.Tensor]:
        def moved(array: Array) -> torch.Tensor:
            return as_tensor(array).to(self.device)

        return AttentionMetadata(
            query_start_loc=moved(metadata.query_start_loc),
            seq_lens=moved(metadata.seq_lens),
            block_table=moved(metadata.block_table),
            table_rows=moved(metadata.table_rows),
            slot_mapping=moved(metadata.slot_mapping),
            positions=moved(metadata.positions),
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            num_reqs=metadata.num_reqs,
            num_tokens=metadata.num_tokens,
            num_decodes=metadata.num_decodes,
        )
