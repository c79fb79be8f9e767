"""What the worker and the model runner know of a device: `Runtime`. It plans and loads a model's weights, holds the KV
cache, and runs a step's tokens through the model that a `ModelSpec` describes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from ..attention.interface import AttentionBackend, KVCache, StepMetadata
from ..dtypes import AnyDType, DType
from ..kernels import memory
from ..kernels.memory import Array, as_tensor
from ..lazy_torch import inference_mode, torch
from ..lora.adapter import Adapter, AdapterRows
from ..models import ops
from ..models.spec import ModelSpec
from ..models.tensor_names import Projection
from ..models.tensor_source import TensorSource
from ..models.weight_plan import Kinds, MatrixPlan, WeightPlan, plan_weights
from ..models.weights import DecoderWeights, PromptEmbeds
from . import cpu_memory
from .kv_layout import KVLayout

M = TypeVar("M")


class Runtime(ABC, Generic[M]):
    """One model on one device, its matrices kept as M. `weights` are None until they are loaded, and after they are
    unloaded; `kv_caches` has a cache a layer, or none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: AnyDType,
        quantization: str | None,
        attention: Sequence[AttentionBackend],
    ) -> None:
        """attention: one a layer."""
        self.spec = spec
        self.dtype = DType.of(dtype)
        self.quantization = quantization
        self.attention = attention
        self.kv_layout = KVLayout(spec)
        self.kv_groups = self.kv_layout.kinds
        self.weights: DecoderWeights[M] | None = None
        self.shared_bytes = 0  # of the weights, in files that other engines may map too
        self.kv_caches: list[KVCache] = []

    def plan(self, source: TensorSource) -> WeightPlan[M]:
        """How each matrix is kept. Raises ValueError where the file does not suit the quantisation."""
        return plan_weights(self.spec, self.dtype, self.quantization, source, self._plan_matrix)

    @abstractmethod
    def _plan_matrix(self, projection: Projection, kinds: Kinds) -> MatrixPlan[M]: ...

    def load(self, plan: WeightPlan[M], source: TensorSource, num_positions: int = 0) -> None:
        """num_positions: as many a sequence may have, as far as known.

        Raises ValueError naming the tensors that `source` lacks, has in excess, or has in another shape."""
        self.unload()
        with memory.separate():
            self.weights = self._load(plan, source, num_positions)

    @abstractmethod
    def _load(self, plan: WeightPlan[M], source: TensorSource, num_positions: int) -> DecoderWeights[M]: ...

    def unload(self) -> None:
        """Gives the weights' memory back."""
        self.weights, self.shared_bytes = None, 0

    def available_memory(self) -> int:
        """Bytes of the device's memory that can still be used. Mapped weights are not, though the system counts files
        as available: every step reads them."""
        return max(0, cpu_memory.available_memory() - self.shared_bytes)

    def kv_budget(self, utilization: float, max_num_tokens: int, max_num_reqs: int) -> int:
        """Bytes that the KV cache may take beside the loaded weights and a step of so many tokens and requests."""
        needed = cpu_memory.activation_bytes(self.spec, self.dtype, max_num_tokens, max_num_reqs)
        return cpu_memory.kv_budget(self.available_memory(), utilization, needed)

    def kv_block_bytes(self) -> int:
        """Bytes of one block over the layers that share it."""
        return self.kv_layout.block_bytes(self.attention)

    def allocate_kv(self, num_blocks: int) -> None:
        """Zeros, in place of any cache before. Block 0 is the null block: read as padding, never written.

        Raises OSError, MemoryError or RuntimeError where the system refuses the memory.
        """
        self.release_kv()
        with memory.separate():
            self.kv_caches = self.kv_layout.allocate(self.attention, num_blocks)

    def release_kv(self) -> None:
        """Gives the cache's memory back."""
        self.kv_caches = []

    @abstractmethod
    def forward(
        self,
        token_ids: np.ndarray | torch.Tensor,
        metadata: StepMetadata,
        output_rows: np.ndarray | torch.Tensor | None = None,
        prompt_embeds: PromptEmbeds = (),
        adapters: Sequence[AdapterRows] = (),
    ) -> Array:
        """Embeds the tokens, runs all layers and returns the hidden states before the final norm, on the device.

        token_ids: [num_tokens] int64; metadata: one a KV group; output_rows: [n] int64, the tokens whose states are
        wanted, None for all; adapters: of a token at most one. All arguments are on the CPU. Returns
        [n or num_tokens, hidden_size], valid until the next call.

        Called again with the same metadata object, it replays the step: all other arguments are the same objects too,
        and without `output_rows` their contents may have changed.
        """

    def keep_adapter(self, adapter: Adapter) -> Adapter:
        """An adapter as its files have it, in the form in which `forward` takes it."""
        return adapter

    @inference_mode
    def final_states(self, hidden: Array) -> torch.Tensor:
        """hidden: [n, hidden_size] from `forward`. Returns them behind the final norm, [n, hidden_size] float32."""
        norm = as_tensor(self._loaded().norm)
        return ops.rms_norm(as_tensor(hidden).float(), norm.float(), self.spec.rms_norm_eps)

    @abstractmethod
    def logits(self, hidden: Array) -> Array:
        """hidden: [n, hidden_size] from `forward`. Returns [n, vocab_size] float32, valid until the next call."""

    def _loaded(self) -> DecoderWeights[M]:
        assert self.weights is not None, "the model is asleep"
        return self.weights
