"""The KV cache's blocks: which are free, in what order they are reused, and which hold a known prefix.

Called only by `KVCacheManager`. Blocks are counted here and nowhere else; their bytes belong to the attention backend.
"""

from collections.abc import Sequence


class KVCacheBlock:
    """One block. `ref_cnt` requests use it; while that is 0 it is a link of the free list."""

    __slots__ = ("block_id", "ref_cnt", "block_hash", "prev_free", "next_free")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None  # set while the block can be found by its content
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        cached = "cached" if self.block_hash is not None else "not cached"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, {cached})"


class FreeBlockQueue:
    """A doubly linked list of free blocks, next to be reused first. Every operation on one block is O(1)."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)  # the two ends are sentinels, so no link of a real block is ever None
        self._tail = KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free_blocks = 0
        self.append(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the block that is next to be reused. Raises ValueError when none is free."""
        block = self._head.next_free
        if block is None or block is self._tail:
            raise ValueError("no free block is left")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take this block out, wherever it stands. Raises ValueError when it is not in the list."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block} is not in the free list")
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put the blocks at the end, to be reused last."""
        last = self._tail.prev_free
        assert last is not None
        for block in blocks:
            last.next_free, block.prev_free = block, last
            last = block
        last.next_free, self._tail.prev_free = self._tail, last
        self.num_free_blocks += len(blocks)

    def prepend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put the blocks at the front, to be reused next, in the order given."""
        first = self._head.next_free
        assert first is not None
        before = self._head
        for block in blocks:
            before.next_free, block.prev_free = block, before
            before = block
        before.next_free, first.prev_free = first, before
        self.num_free_blocks += len(blocks)


class BlockPool:
    """All blocks of the cache. Block 0 is the null block: it pads block tables, stands for blocks that a request gave
    back, and is never handed out. The pool holds it itself, so that it may be touched and freed like any other.

    A free block keeps its content, and its hash, until it is handed out again (lazy eviction, least recently used
    first); blocks that cannot be found by content are reused before any that can. A hash leads to one block: a second
    block with the same content stays without one.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_gpu_blocks is {num_blocks}; it must be at least 2 (block 0 is never used)")
        self.num_usable_blocks = num_blocks - 1
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.ref_cnt = 1
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self.block_by_hash: dict[bytes, KVCacheBlock] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses, those with cached content included."""
        return self.free_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """The share of usable blocks that requests hold, 0..1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out blocks for writing, each with ref_cnt 1 and its former content forgotten.

        Raises ValueError when fewer are free.
        """
        queue = self.free_queue
        if num_blocks > queue.num_free_blocks:
            raise ValueError(f"{num_blocks} blocks wanted, {queue.num_free_blocks} free")
        blocks = []
        for _ in range(num_blocks):
            block = queue.popleft()
            if block.block_hash is not None:
                del self.block_by_hash[block.block_hash]
                block.block_hash = None
            block.ref_cnt = 1
            blocks.append(block)
        return blocks

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block with this content, in use or free."""
        return self.block_by_hash.get(block_hash)

    def cache(self, block: KVCacheBlock, block_hash: bytes) -> bool:
        """Let the block be found by its hash; False when another block with that content is known already."""
        if block.block_hash is not None or block_hash in self.block_by_hash:
            return False
        self.block_by_hash[block_hash] = block
        block.block_hash = block_hash
        return True

    def uncache(self, block: KVCacheBlock) -> None:
        """Let the block no longer be found; if it is free it becomes the next to be reused."""
        if block.block_hash is None:
            return
        del self.block_by_hash[block.block_hash]
        block.block_hash = None
        if block.ref_cnt == 0:
            self.free_queue.remove(block)
            self.free_queue.prepend([block])

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let one more request use these cached blocks."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """One request gives these blocks up, its last first.

        Cached ones are evicted in this order; the others are handed out again in the order they had, as neighbours are
        read fastest.
        """
        with_hash: list[KVCacheBlock] = []
        without_hash: list[KVCacheBlock] = []
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(f"{block} was freed more often than it was handed out")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (without_hash if block.block_hash is None else with_hash).append(block)
        self.free_queue.prepend(without_hash[::-1])
        self.free_queue.append(with_hash)

    def reset(self) -> bool:
        """Forget all content. False, and nothing done, while a request uses any block."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in self.block_by_hash.values():
            block.block_hash = None
        self.block_by_hash.clear()
        return True
