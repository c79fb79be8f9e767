"""Gives requests the KV-cache blocks they need and finds prefixes that are in the cache already.

Called only by the scheduler. A request is known by its id here; its blocks are listed by the managers of the groups.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ...protocol.outputs import PrefixCacheStats
from .block_pool import BlockPool, KVCacheBlock
from .group_manager import GroupManager
from .groups import KVCacheConfig


class Prefix(NamedTuple):
    """Cached tokens with which a request can begin, and their blocks by group."""

    num_tokens: int
    blocks: list[list[KVCacheBlock]]


class KVCacheManager:
    """Blocks for requests, out of one pool for all KV groups, with prefix caching by content.

    A full block can be found from the moment the scheduler plans its computation, so that a request admitted in the
    same step shares it: the model runner writes the keys and values of the whole step before it attends to any of
    them. Until the step is through such blocks are *uncommitted*, and `revoke` takes them back if it did not happen.
    """

    def __init__(self, config: KVCacheConfig, num_blocks: int, enable_caching: bool) -> None:
        self.config = config
        self.block_size = config.block_size
        self.enable_caching = enable_caching
        self.block_pool = BlockPool(num_blocks)
        self.groups = [GroupManager(config, index, self.block_pool) for index in range(len(config.kinds))]
        self._num_cached: dict[str, int] = {}  # blocks of each request, from the first, that were let be found
        self._uncommitted: dict[str, list[KVCacheBlock]] = {}
        self._stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """The share of the cache that requests hold, 0..1."""
        return self.block_pool.usage

    @property
    def num_free_blocks(self) -> int:
        return self.block_pool.num_free_blocks

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether the whole cache, were it empty, has room for so many tokens of one request."""
        return self.config.blocks_for(num_tokens) <= self.block_pool.num_usable_blocks

    def longest_request(self, limit: int) -> int:
        """How many tokens of one request, up to `limit`, the whole cache has room for."""
        return self.config.longest_request(self.block_pool.num_usable_blocks, limit)

    def find_prefix(self, block_hashes: Sequence[bytes], num_tokens: int) -> Prefix:
        """The longest prefix that every group has cached and that leaves at least one of the tokens to compute.

        Nothing is claimed yet; pass it on to `admit`.
        """
        length = min(len(block_hashes), (num_tokens - 1) // self.block_size) if self.enable_caching else 0
        num_agreed = 0
        for group in itertools.cycle(self.groups):  # until a length satisfies all
            shorter = group.longest_prefix(block_hashes, length)
            num_agreed = num_agreed + 1 if shorter == length else 1
            length = shorter
            if num_agreed == len(self.groups):
                break
        return Prefix(length * self.block_size, [group.cached_blocks(block_hashes[:length]) for group in self.groups])

    def admit(self, request_id: str, num_tokens: int, prefix: Prefix, watermark: int = 0) -> bool:
        """Give a new request the prefix, and blocks with which all its `num_tokens` tokens can be computed.

        False, and nothing changed, when there are not enough or fewer than `watermark` a group would be left.
        """
        num_new = [
            group.num_to_admit(num_tokens, blocks) for group, blocks in zip(self.groups, prefix.blocks, strict=True)
        ]
        num_revived = sum(block.ref_cnt == 0 for blocks in prefix.blocks for block in blocks)
        if sum(num_new) + num_revived + watermark * len(num_new) > self.block_pool.num_free_blocks:
            return False
        for blocks in prefix.blocks:
            self.block_pool.touch(blocks)
        for group, blocks, count in zip(self.groups, prefix.blocks, num_new, strict=True):
            group.blocks[request_id] = [*blocks, *self.block_pool.get_new_blocks(count)]
        self._num_cached[request_id] = len(prefix.blocks[0])
        return True

    def extend(self, request_id: str, num_computed: int, num_tokens: int, watermark: int = 0) -> list[list[int]] | None:
        """Give a request what it lacks to compute its tokens from `num_computed` up to `num_tokens`.

        Blocks that these do not attend to are given back. The new blocks' ids by group, [] if there are none; None, and
        none given, when there are not enough or fewer than `watermark` a group would be left.
        """
        num_blocks, num_new = -(-num_tokens // self.block_size), 0
        for group in self.groups:
            num_new += group.num_missing(request_id, num_computed, num_blocks)
        if num_new == 0:
            return []
        if num_new + watermark * len(self.groups) > self.block_pool.free_queue.num_free_blocks:
            return None
        return [group.extend(request_id, num_blocks) for group in self.groups]

    def block_ids(self, request_id: str) -> list[list[int]]:
        """By group. The null block's id stands for blocks that are not read any more."""
        return [[block.block_id for block in group.blocks[request_id]] for group in self.groups]

    def holds_any(self, request_id: str, block_ids: Collection[int]) -> bool:
        return any(block.block_id in block_ids for group in self.groups for block in group.blocks[request_id])

    def cache_blocks(self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Let the blocks be found that are full once the step that is being planned has computed `num_tokens`."""
        if not self.enable_caching:
            return
        start, end = self._num_cached[request_id], num_tokens // self.block_size
        if end <= start:
            return
        uncommitted = self._uncommitted.setdefault(request_id, [])
        for group in self.groups:
            uncommitted += group.cache(request_id, block_hashes, start, end)
        self._num_cached[request_id] = end

    def commit(self) -> None:
        """The step was computed: what it filled is there to stay."""
        self._uncommitted.clear()

    def revoke(self, request_id: str) -> list[int]:
        """The request's part of the step is void: the blocks it would have filled, returned, can be found no longer."""
        blocks = self._uncommitted.pop(request_id, [])
        for block in blocks:
            self.block_pool.uncache(block)
        return [block.block_id for block in blocks]

    def free(self, request_id: str) -> None:
        """Take all blocks of the request back, if it has any."""
        if self._num_cached.pop(request_id, None) is not None:
            for group in self.groups:
                group.free(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False, and nothing done, while a request holds blocks."""
        if not self.block_pool.reset():
            return False
        self._stats.reset = True
        return True

    def record_lookup(self, num_tokens: int, num_hits: int) -> None:
        """Count an admitted request: its tokens, and how many of them the cache had."""
        if self.enable_caching:
            self._stats.requests += 1
            self._stats.queries += num_tokens
            self._stats.hits += num_hits

    def take_stats(self) -> PrefixCacheStats:
        """The counts since the last call."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats
