"""One KV group's blocks, by request. Called only by `KVCacheManager`, which keeps the groups in step."""

from collections.abc import Sequence

from .block_pool import BlockPool, KVCacheBlock
from .groups import KVCacheConfig


class GroupManager:
    """`blocks` has each request's blocks in the order of its tokens. Where no token attends to a block any more, it was
    given back, and the null block stands in its place.
    """

    def __init__(self, config: KVCacheConfig, index: int, block_pool: BlockPool) -> None:
        self.blocks: dict[str, list[KVCacheBlock]] = {}
        self._config = config
        self._kind = config.kinds[index]
        self._block_size = config.block_size
        self._pool = block_pool
        self._key_suffix = bytes([index])  # the same tokens' blocks hold something else in each group

    def longest_prefix(self, block_hashes: Sequence[bytes], limit: int) -> int:
        """How many blocks, at most `limit`, of the request with these hashes need not be computed."""
        find, suffix = self._pool.get_cached_block, self._key_suffix
        return self._kind.longest_prefix(
            lambda index: find(block_hashes[index] + suffix) is not None, limit, self._block_size
        )

    def cached_blocks(self, block_hashes: Sequence[bytes]) -> list[KVCacheBlock]:
        """The blocks of a prefix that `longest_prefix` found, without those that are not read any more."""
        first = self._kind.first_read(len(block_hashes) * self._block_size) // self._block_size
        found = [self._pool.get_cached_block(block_hash + self._key_suffix) for block_hash in block_hashes[first:]]
        return [self._pool.null_block] * first + [block for block in found if block is not None]

    def num_to_admit(self, num_tokens: int, prefix: Sequence[KVCacheBlock]) -> int:
        """New blocks with which a request's first `num_tokens` tokens can be computed, chunk by chunk.

        A chunk may reuse what those before it give back, but for blocks that are shared and so do not become free.
        """
        size = self._block_size
        first = self._kind.first_read(len(prefix) * size) // size
        most = self._kind.most_blocks(num_tokens - first * size, size, self._config.max_step_tokens)
        num_own = sum(block.ref_cnt == 0 for block in prefix[first:])
        return min(-(-num_tokens // size) - len(prefix), most - num_own)

    def num_missing(self, request_id: str, num_computed: int, num_blocks: int) -> int:
        """Give back what is not read from token `num_computed` on; how many the request lacks of `num_blocks`."""
        blocks = self.blocks[request_id]
        first = self._kind.first_read(num_computed) // self._block_size
        if first:
            self._give_back(blocks, first)
        missing = num_blocks - len(blocks)
        return missing if missing > 0 else 0

    def _give_back(self, blocks: list[KVCacheBlock], end: int) -> None:
        """Let go of the first `end` blocks, as far as that has not been done."""
        unread, null_block = [], self._pool.null_block
        while end and blocks[end - 1] is not null_block:
            end -= 1
            unread.append(blocks[end])
            blocks[end] = null_block
        self._pool.touch([null_block] * len(unread))
        self._pool.free(unread)

    def extend(self, request_id: str, num_blocks: int) -> list[int]:
        """Give the request the blocks it lacks of `num_blocks`; their ids."""
        blocks = self.blocks[request_id]
        new_blocks = self._pool.get_new_blocks(num_blocks - len(blocks))
        blocks += new_blocks
        return [block.block_id for block in new_blocks]

    def cache(self, request_id: str, block_hashes: Sequence[bytes], start: int, end: int) -> list[KVCacheBlock]:
        """Let blocks `start` to `end` be found; those of them that no other block with that content kept from it."""
        blocks = self.blocks[request_id]
        return [
            blocks[index]
            for index in range(start, end)
            if self._pool.cache(blocks[index], block_hashes[index] + self._key_suffix)
        ]

    def free(self, request_id: str) -> None:
        """The end of the request's text is evicted before the beginning."""
        self._pool.free(self.blocks.pop(request_id)[::-1])
