"""The runtime of encoders, on the CPU. A text goes through in one step, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..attention.interface import StepMetadata
from ..dtypes import DType
from ..kernels import memory
from ..kernels.linear import Int8Weight, PackedWeight
from ..kernels.memory import as_tensor
from ..kv_cache.groups import FullAttention
from ..lazy_torch import inference_mode, torch
from ..models.encoder import EncoderLayer, EncoderSpec, EncoderWeights, Norm, encoder_bytes, load_encoder
from ..models.tensor_source import TensorSource
from . import cpu_memory

Matrix = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """Bytes of the weights as they are kept, and while they are loaded."""

    kept_as: str
    num_bytes: int
    peak_bytes: int


class EncoderRuntime:
    """As far as workers go a `Runtime`, whose KV blocks take no memory.

    All texts of a step go through the products together, and attend each to itself; nothing is padded. The states
    between the products are float32. A text has the same bits alone and in any batch: the native kernels of bfloat16
    and int8 add up a row by itself, and so do oneDNN's of float32 for two rows and more.
    """

    kv_groups = (FullAttention(),)

    def __init__(self, spec: EncoderSpec, dtype: DType, quantization: str | None) -> None:
        self.spec = spec
        self.quantization = quantization
        kind = Int8Weight if quantization == "int8" else PackedWeight
        takes_all = all(kind.supports(dtype, size, size) for size in (spec.hidden_size, spec.inner_size))
        self._packed = kind if takes_all else None
        self.dtype = dtype if takes_all else DType.FLOAT32
        self.weights: EncoderWeights[Matrix] | None = None

    def plan(self, source: TensorSource) -> EncoderPlan:
        num_bytes = encoder_bytes(self.spec, self.dtype.itemsize)
        return EncoderPlan(str(self.dtype), num_bytes, num_bytes + self.spec.hidden_size * self.spec.inner_size * 12)

    def load(self, plan: EncoderPlan, source: TensorSource, num_positions: int = 0) -> None:
        """Raises ValueError naming the tensors that `source` lacks, has in excess, or has in another shape."""
        self.unload()
        with memory.separate():
            self.weights = load_encoder(self.spec, source, self.dtype.torch, self._matrix)

    def unload(self) -> None:
        self.weights = None

    def available_memory(self) -> int:
        return cpu_memory.available_memory()

    def kv_budget(self, utilization: float, max_num_tokens: int, max_num_reqs: int) -> int:
        return 0

    def kv_block_bytes(self) -> int:
        return 0

    def allocate_kv(self, num_blocks: int) -> None: ...

    def release_kv(self) -> None: ...

    @inference_mode
    def encode(
        self, token_ids: np.ndarray | torch.Tensor, metadata: StepMetadata, token_types: np.ndarray | None = None
    ) -> np.ndarray:
        """token_ids, token_types: [num_tokens] int64; None: all of the first type. Every text of the step is whole.
        Returns the last layer's states, [num_tokens, hidden_size] float32."""
        assert self.weights is not None, "the model is asleep"
        weights, ids, positions = self.weights, as_tensor(token_ids), as_tensor(metadata[0].positions)
        starts = metadata[0].query_start_loc.tolist()
        hidden = weights.words[ids].float()
        hidden += weights.positions[self._places(ids, positions, starts)]
        hidden += weights.token_types[0 if token_types is None else torch.from_numpy(token_types)]
        hidden = self._norm(hidden, weights.norm)
        for layer in weights.layers:
            hidden = self._block(layer, hidden, starts)
        return hidden.numpy()

    def _block(self, layer: EncoderLayer[Matrix], hidden: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        attended = self._attend(layer.qkv(hidden), starts)
        hidden = self._norm(hidden + layer.attention_output(attended), layer.attention_norm)
        inner = self._activated(layer.inner(hidden))
        return self._norm(hidden + layer.output(inner), layer.output_norm)

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.activation == "relu":
            return torch.relu(x)
        return torch.nn.functional.gelu(x, approximate="tanh" if self.spec.activation == "gelu_tanh" else "none")

    def _attend(self, qkv: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """qkv: [num_tokens, 3 * hidden_size] float32. Each text's tokens attend to all of its own."""
        heads = qkv.view(len(qkv), 3, self.spec.num_heads, -1).permute(1, 2, 0, 3)  # of q, k, v: [heads, tokens, size]
        texts = []
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            q, k, v = heads[:, None, :, start:end]
            texts.append(
                torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(end - start, -1)
            )
        return torch.cat(texts)

    def _places(self, token_ids: torch.Tensor, positions: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        padding_id = self.spec.padding_id
        if padding_id is None:
            return positions
        counted = (token_ids != padding_id).long()
        total = counted.cumsum(0)
        first = torch.tensor(starts[:-1])
        before = (total - counted)[first].repeat_interleave(torch.tensor(starts).diff())
        return (total - before) * counted + padding_id

    def _norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        size = (self.spec.hidden_size,)
        weight, bias = norm.weight.float(), norm.bias.float()
        return torch.nn.functional.layer_norm(x, size, weight, bias, self.spec.norm_eps)

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor) -> Matrix:
        if self._packed is None:
            return partial(_at_least_two_rows, _linear(weight, bias))
        packed: Any = self._packed(weight, bias)
        return lambda x: packed(x.bfloat16(), torch.float32)


def _at_least_two_rows(product: Matrix, x: torch.Tensor) -> torch.Tensor:
    """oneDNN adds up a single row in an order of its own."""
    return product(x) if len(x) > 1 else product(x.repeat(2, 1))[:1]


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> Matrix:
    from ..models.linear import DenseLinear, PackedLinear  # load torch

    kind = PackedLinear if PackedLinear.supports(weight.dtype) else DenseLinear
    return kind(weight, bias)


def make_encoder(spec: EncoderSpec, dtype: DType, quantization: str | None) -> EncoderRuntime:
    """Raises ValueError for a quantisation that encoders do not have."""
    if quantization == "gguf":
        raise ValueError("quantization 'gguf' is not supported by encoders; use 'int8', or none")
    return EncoderRuntime(spec, dtype, quantization)
