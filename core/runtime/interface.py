"""What the worker and the model runner know of a device: `Runtime`. It plans and loads a model's weights, holds the KV
cache, and runs a step's tokens through the model that a `ModelSpec` describes."""

from typing import Any, Protocol

import torch

from ..attention.interface import StepMetadata
from ..kv_cache.groups import LayerKind
from ..models.spec import ModelSpec
from ..models.tensor_source import TensorSource
from ..models.weight_plan import WeightPlan
from ..models.weights import DecoderWeights, PromptEmbeds


class Runtime(Protocol):
    """One model on one device. `weights` are None until they are loaded, and after they are unloaded."""

    spec: ModelSpec
    kv_groups: tuple[LayerKind, ...]
    weights: DecoderWeights[Any] | None

    def plan(self, source: TensorSource) -> WeightPlan[Any]:
        """How this runtime keeps each matrix. Raises ValueError where the file does not suit the quantisation."""

    def load(self, plan: WeightPlan[Any], source: TensorSource) -> None:
        """Raises ValueError naming the tensors that `source` lacks, has in excess, or has in another shape."""

    def unload(self) -> None:
        """Gives the weights' memory back."""

    def available_memory(self) -> int:
        """Bytes of the device's memory that can still be used."""

    def kv_budget(self, utilization: float, max_num_tokens: int, max_num_reqs: int) -> int:
        """Bytes that the KV cache may take beside the loaded weights and a step of so many tokens and requests."""

    def kv_block_bytes(self) -> int:
        """Bytes of one block over the layers that share it."""

    def allocate_kv(self, num_blocks: int) -> None:
        """Zeros, in place of any cache before. Block 0 is the null block: read as padding, never written.

        Raises OSError, MemoryError or RuntimeError where the system refuses the memory.
        """

    def release_kv(self) -> None:
        """Gives the cache's memory back."""

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: StepMetadata,
        output_rows: torch.Tensor | None = None,
        prompt_embeds: PromptEmbeds = (),
    ) -> torch.Tensor:
        """Embeds the tokens, runs all layers and returns the hidden states before the final norm, on the device.

        token_ids: [num_tokens] int64; metadata: one a KV group; output_rows: [n] int64, the tokens whose states are
        wanted, None for all. All arguments are on the CPU. Returns [n or num_tokens, hidden_size], valid until the next
        call.

        Called again with the same metadata object, it replays the step: all other arguments are the same objects too,
        and without `output_rows` their contents may have changed.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden_size] from `forward`. Returns [n, vocab_size] float32, valid until the next call."""
