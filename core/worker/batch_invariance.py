"""The promise of `VLLM_BATCH_INVARIANT=1`, refused where it cannot be kept. The worker asks before it loads the model.

The native kernels add everything up in an order of its own for each token: along a row of weights, and along the
context at fixed places. oneDNN and torch's attention choose theirs by the shape of the batch.
"""

import torch

from ..attention.interface import AttentionBackend
from ..kernels import library
from ..models.decoder_config import DecoderConfig
from ..models.native_decoder import NativeDecoder


def check_batch_invariance(
    config: DecoderConfig, dtype: torch.dtype, block_size: int, attention_backend: type[AttentionBackend]
) -> None:
    """Raises ValueError naming what to change unless a request's logits will be the same bits in any batch."""
    if NativeDecoder.supports(config, dtype, attention_backend):
        return
    raise ValueError(f"VLLM_BATCH_INVARIANT=1 cannot be kept: {_obstacle(config, dtype, block_size)}")


def _obstacle(config: DecoderConfig, dtype: torch.dtype, block_size: int) -> str:
    name = str(dtype).removeprefix("torch.")
    if dtype != torch.bfloat16:
        return f"dtype is {name}, whose sums depend on the batch; use dtype='bfloat16'"
    if not library.is_available():
        return (
            "the native kernels are not built or switched off; build them and leave CORESPAN_CPU_ISA other than 'none'"
        )
    if block_size % 16:
        return f"block_size is {block_size}; use a multiple of 16"
    return (
        f"no native kernel takes this model's shape (head_dim {config.head_dim}, hidden_size {config.hidden_size}, "
        f"intermediate_size {config.intermediate_size}, {config.num_heads} heads over {config.num_kv_heads} key/value "
        "heads): sizes must be multiples of 16, head_dim at most 512, and 48 heads at most may share a key/value head"
    )
