"""How many KV blocks a core gets. `EngineCore` asks once, at start."""

import logging

from ..protocol import envs
from ..protocol.config import VllmConfig, with_final_figures
from .kv_cache.groups import KVCacheConfig

logger = logging.getLogger("corespan.core")

GIB = 1 << 30
NULL_BLOCKS = 1
"""Block 0, which fills up block tables and holds nothing: allocated, and counted nowhere else."""


def num_kv_blocks(vllm_config: VllmConfig, kv_config: KVCacheConfig, block_bytes: int, available_bytes: int) -> int:
    """Blocks that requests can use, over all KV groups. One more is to be allocated, the null block.

    In order of precedence: `num_gpu_blocks_override`; all that are of use, where a block takes no memory;
    `kv_cache_memory_bytes`; VLLM_CPU_KVCACHE_SPACE; else `available_bytes`, but never more than `max_num_seqs` requests
    of `max_model_len` can use.
    Raises ValueError, naming the largest `max_model_len` that fits, when a single request of `max_model_len` does not
    and `fit_max_model_len` does not allow to lower it.
    """
    cache_config = vllm_config.cache_config
    cache_space = envs.VLLM_CPU_KVCACHE_SPACE
    if cache_config.num_gpu_blocks_override is not None:
        num_blocks = cache_config.num_gpu_blocks_override
    elif not block_bytes:  # nothing is cached, and blocks only count tokens
        num_blocks = _most_useful_blocks(vllm_config, kv_config)
    elif cache_config.kv_cache_memory_bytes is not None:
        num_blocks = cache_config.kv_cache_memory_bytes // block_bytes - NULL_BLOCKS
    elif cache_space is not None:
        num_blocks = int(cache_space * GIB) // block_bytes - NULL_BLOCKS
    else:
        num_blocks = min(available_bytes // block_bytes - NULL_BLOCKS, _most_useful_blocks(vllm_config, kv_config))
    num_blocks = max(num_blocks, 0)
    _check_fits(vllm_config, kv_config, num_blocks, block_bytes)
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB",
        num_blocks,
        cache_config.block_size,
        num_blocks * block_bytes / GIB,
    )
    return num_blocks


def with_kv_blocks(vllm_config: VllmConfig, kv_config: KVCacheConfig, num_blocks: int) -> VllmConfig:
    """The configuration with the final figures: the number of blocks, and a `max_model_len` that they can hold."""
    max_model_len = kv_config.longest_request(num_blocks, vllm_config.model_config.max_model_len)
    return with_final_figures(vllm_config, max_model_len, num_blocks, kv_config.block_size)


def _most_useful_blocks(vllm_config: VllmConfig, kv_config: KVCacheConfig) -> int:
    return vllm_config.scheduler_config.max_num_seqs * kv_config.blocks_for(vllm_config.model_config.max_model_len)


def _check_fits(vllm_config: VllmConfig, kv_config: KVCacheConfig, num_blocks: int, block_bytes: int) -> None:
    max_model_len = vllm_config.model_config.max_model_len
    needed = kv_config.blocks_for(max_model_len)
    longest = kv_config.longest_request(num_blocks, max_model_len)
    if needed <= num_blocks or (longest and vllm_config.model_config.fit_max_model_len):
        return
    raise ValueError(
        f"max_model_len is {max_model_len}: one such request needs {needed} KV blocks "
        f"({needed * block_bytes / GIB:.2f} GiB), and only {num_blocks} of {kv_config.block_size} tokens are there "
        f"({num_blocks * block_bytes / GIB:.2f} GiB). The largest max_model_len that fits is {longest}. "
        "Lower max_model_len, or give the cache more memory (VLLM_CPU_KVCACHE_SPACE, kv_cache_memory_bytes, "
        "gpu_memory_utilization, num_gpu_blocks_override)."
    )
