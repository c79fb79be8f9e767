"""The block pool: order of reuse, reference counts, content that outlives its users."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from scheduling import in_order_of_reuse

from corespan.core.kv_cache.block_pool import BlockPool, FreeBlockQueue, KVCacheBlock


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.num_free_blocks == 0
    assert pool.null_block.block_id == 0


def test_a_pool_needs_a_block_besides_the_null_block() -> None:
    with pytest.raises(ValueError, match="num_gpu_blocks is 1"):
        BlockPool(1)


def test_more_blocks_than_are_free_are_refused_and_nothing_is_taken() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks wanted, 3 free"):
        pool.get_new_blocks(4)
    assert pool.num_free_blocks == 3


def test_usage_counts_cached_but_unused_blocks_as_free() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(2)
    pool.cache(blocks[0], b"a")
    assert pool.usage == 0.5
    pool.free(blocks)
    assert pool.usage == 0.0
    assert pool.get_cached_block(b"a") is blocks[0]


def test_blocks_without_content_are_reused_first_and_the_rest_least_recently_used_first() -> None:
    pool = BlockPool(7)
    a, b, c, d = pool.get_new_blocks(4)
    pool.cache(a, b"a")
    pool.cache(b, b"b")
    pool.free([b, a])
    pool.free([d, c])
    assert ids(in_order_of_reuse(pool.blocks)) == ids([c, d]) + [5, 6] + ids([b, a])
    assert ids(pool.get_new_blocks(5)) == ids([c, d]) + [5, 6] + ids([b])
    assert pool.get_cached_block(b"b") is None
    assert pool.get_cached_block(b"a") is a


def test_a_touched_block_is_kept_from_reuse_until_every_user_frees_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.get_new_blocks(1)
    pool.cache(block, b"a")
    pool.touch([block])
    pool.free([block])
    assert pool.num_free_blocks == 0
    pool.free([block])
    pool.touch([block])
    assert pool.num_free_blocks == 0 and block.ref_cnt == 1


def test_a_block_freed_too_often_is_an_error() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.free(blocks)


def test_a_second_block_with_the_same_content_stays_unknown() -> None:
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    assert pool.cache(first, b"a")
    assert not pool.cache(second, b"a")
    assert second.block_hash is None
    assert pool.get_cached_block(b"a") is first


def test_an_uncached_free_block_is_the_next_to_be_reused() -> None:
    pool = BlockPool(4)
    a, b = pool.get_new_blocks(2)
    pool.cache(a, b"a")
    pool.cache(b, b"b")
    pool.free([a, b])
    pool.uncache(b)
    assert pool.get_cached_block(b"b") is None
    assert ids(pool.get_new_blocks(2)) == [b.block_id, 3]


def test_reset_forgets_all_content_but_not_while_a_block_is_in_use() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.cache(blocks[0], b"a")
    assert not pool.reset()
    assert pool.get_cached_block(b"a") is blocks[0]
    pool.free(blocks)
    assert pool.reset()
    assert pool.get_cached_block(b"a") is None
    assert not pool.block_by_hash
    assert pool.cache(pool.get_new_blocks(1)[0], b"a")


def test_taking_from_an_empty_free_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="no free block"):
        FreeBlockQueue([]).popleft()


def test_removing_a_block_that_is_not_in_the_free_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in the free list"):
        FreeBlockQueue([]).remove(KVCacheBlock(1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("paAr"), st.integers(0, 9)), max_size=60))
def test_the_free_list_behaves_like_a_list(operations: list[tuple[str, int]]) -> None:
    blocks = [KVCacheBlock(i) for i in range(10)]
    queue, model = FreeBlockQueue(blocks[:5]), blocks[:5]
    for operation, number in operations:
        outside = [block for block in blocks if block not in model][: number % 4]
        if operation == "p" and model:
            assert queue.popleft() is model.pop(0)
        elif operation == "a":
            queue.append(outside)
            model = model + outside
        elif operation == "A":
            queue.prepend(outside)
            model = outside + model
        elif operation == "r" and model:
            queue.remove(model.pop(number % len(model)))
        assert in_order_of_reuse(blocks) == model
        assert queue.num_free_blocks == len(model)
