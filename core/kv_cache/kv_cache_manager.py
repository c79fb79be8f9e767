"""Gives requests the KV-cache blocks they need and finds prefixes that are in the cache already.

Called only by the scheduler. A request's blocks are listed on the request; this class alone changes that list.
"""

from collections.abc import Sequence

from ...protocol.outputs import PrefixCacheStats
from ..scheduler.request import Request
from .block_pool import BlockPool, KVCacheBlock


class KVCacheManager:
    """Blocks for requests, with prefix caching by content.

    A full block can be found from the moment the scheduler plans its computation, so that a request admitted in the
    same step shares it: the model runner writes the keys and values of the whole step before it attends to any of
    them. Until the step is through such blocks are *uncommitted*, and `revoke` takes them back if it did not happen.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.block_pool = BlockPool(num_blocks)
        self._uncommitted: dict[str, list[KVCacheBlock]] = {}
        self._stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """The share of the cache that requests hold, 0..1."""
        return self.block_pool.usage

    @property
    def capacity(self) -> int:
        """How many tokens of one request the cache holds at most."""
        return self.block_pool.num_usable_blocks * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return self.block_pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether the whole cache, were it empty, has room for so many tokens of one request."""
        return num_tokens <= self.capacity

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest run of cached blocks at the start of the request that leaves at least one token to compute.

        Nothing is claimed yet; pass the blocks on to `allocate_slots`.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return []
        request.extend_block_hashes()
        blocks: list[KVCacheBlock] = []
        max_blocks = (request.num_tokens - 1) // self.block_size
        for block_hash in request.block_hashes[:max_blocks]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: Sequence[KVCacheBlock] = (), keep_free: int = 0
    ) -> list[int] | None:
        """Give the request blocks for its first `num_tokens` tokens; the ids of those it did not have.

        `computed_blocks` come first for a request that has none yet. None, and nothing changed, when there are not
        enough blocks or fewer than `keep_free` would be left.
        """
        num_new = self.num_blocks_for(num_tokens) - len(request.blocks) - len(computed_blocks)
        if num_new <= 0 and not computed_blocks:
            return []
        num_revived = sum(block.ref_cnt == 0 for block in computed_blocks)
        if num_new + num_revived + keep_free > self.block_pool.num_free_blocks:
            return None
        self.block_pool.touch(computed_blocks)
        new_blocks = [*computed_blocks, *self.block_pool.get_new_blocks(num_new)]
        request.blocks.extend(new_blocks)
        if computed_blocks:
            request.num_cached_blocks = len(computed_blocks)
        return [block.block_id for block in new_blocks]

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let the blocks be found that are full once the step that is being planned has computed `num_tokens`."""
        num_full = num_tokens // self.block_size
        if not self.enable_caching or num_full <= request.num_cached_blocks:
            return
        request.extend_block_hashes()
        uncommitted = self._uncommitted.setdefault(request.request_id, [])
        for index in range(request.num_cached_blocks, num_full):
            block = request.blocks[index]
            if self.block_pool.cache(block, request.block_hashes[index]):
                uncommitted.append(block)
        request.num_cached_blocks = num_full

    def commit(self) -> None:
        """The step was computed: what it filled is there to stay."""
        self._uncommitted.clear()

    def revoke(self, request_id: str) -> list[int]:
        """The request's part of the step is void: the blocks it would have filled, returned, can be found no longer."""
        blocks = self._uncommitted.pop(request_id, [])
        for block in blocks:
            self.block_pool.uncache(block)
        return [block.block_id for block in blocks]

    def free(self, request: Request) -> None:
        """Take all blocks of the request back; the end of its text is evicted before the beginning."""
        self.block_pool.free(request.blocks[::-1])
        request.blocks = []
        request.num_cached_blocks = 0

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
