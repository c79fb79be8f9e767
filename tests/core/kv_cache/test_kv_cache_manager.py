"""Blocks for requests by KV group, and prefixes that are found again."""

import pytest

from corespan.core.kv_cache.block_hash import BlockHasher
from corespan.core.kv_cache.groups import FullAttention, KVCacheConfig, LayerKind, SlidingWindow, group_layers
from corespan.core.kv_cache.kv_cache_manager import KVCacheManager, Prefix

SIZE = 4


def make_manager(
    num_blocks: int = 20, caching: bool = True, kinds: tuple[LayerKind, ...] = (FullAttention(),), step: int = 100
) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig(kinds, SIZE, step), num_blocks, caching)


def hashes_of(num_tokens: int, cache_salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(SIZE).extend(hashes, range(num_tokens), cache_salt)
    return hashes


def find(manager: KVCacheManager, num_tokens: int, cache_salt: str | None = None) -> Prefix:
    return manager.find_prefix(hashes_of(num_tokens, cache_salt), num_tokens)


def compute(manager: KVCacheManager, name: str, num_tokens: int, cache_salt: str | None = None) -> list[list[int]]:
    """Admit a request and compute all of its tokens, as one step would. Its block ids, by group."""
    assert manager.admit(name, num_tokens, find(manager, num_tokens, cache_salt))
    manager.cache_blocks(name, hashes_of(num_tokens, cache_salt), num_tokens)
    manager.commit()
    return manager.block_ids(name)


def go_on(manager: KVCacheManager, name: str, computed: int, num_tokens: int, step: int = 1) -> None:
    """Compute tokens `computed` to `num_tokens` of an admitted request, `step` at a time."""
    for start in range(computed, num_tokens, step):
        end = min(start + step, num_tokens)
        assert manager.extend(name, start, end) is not None
        manager.cache_blocks(name, hashes_of(end), end)
        manager.commit()


def held(manager: KVCacheManager, name: str) -> list[int]:
    """How many blocks the request holds, by group."""
    return [sum(block_id != 0 for block_id in ids) for ids in manager.block_ids(name)]


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    for num_tokens, hits in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)):
        manager = make_manager()
        compute(manager, "a", num_tokens)
        assert find(manager, num_tokens).num_tokens == hits * SIZE, num_tokens


def test_a_hit_shares_blocks_and_takes_new_ones_for_the_rest() -> None:
    manager = make_manager()
    assert compute(manager, "a", 10) == [[1, 2, 3]]
    assert compute(manager, "b", 12) == [[1, 2, 4]]
    assert [manager.block_pool.blocks[block_id].ref_cnt for block_id in (1, 2, 3, 4)] == [2, 2, 1, 1]


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    manager = make_manager(6)
    compute(manager, "a", 12)
    manager.free("a")
    prefix = find(manager, 21)
    assert prefix.num_tokens == 12
    assert not manager.admit("b", 21, prefix)
    assert not manager.admit("b", 20, prefix, watermark=1)
    assert manager.num_free_blocks == 5 and "b" not in manager.groups[0].blocks
    assert all(block.ref_cnt == 0 for block in prefix.blocks[0])


def test_revived_blocks_count_as_taken() -> None:
    manager = make_manager(4)
    compute(manager, "a", 8)
    manager.free("a")
    assert manager.admit("b", 12, find(manager, 12))
    assert manager.num_free_blocks == 0


def test_freed_blocks_are_evicted_from_the_end_of_the_text() -> None:
    manager = make_manager(4)
    compute(manager, "a", 12)
    manager.free("a")
    compute(manager, "b", 4, cache_salt="other")
    assert find(manager, 13).num_tokens == 2 * SIZE


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(caching=False)
    compute(manager, "a", 12)
    assert find(manager, 12).num_tokens == 0
    assert not manager.block_pool.block_by_hash


def test_a_different_salt_shares_nothing() -> None:
    manager = make_manager()
    compute(manager, "a", 12, cache_salt="x")
    assert [find(manager, 12, salt).num_tokens for salt in (None, "y", "x")] == [0, 0, 2 * SIZE]


def test_blocks_of_a_step_that_did_not_happen_are_not_found() -> None:
    manager = make_manager(kinds=(FullAttention(), SlidingWindow(8)))
    assert manager.admit("a", 12, find(manager, 12))
    manager.cache_blocks("a", hashes_of(12), 8)
    manager.commit()
    manager.cache_blocks("a", hashes_of(12), 12)
    void = manager.revoke("a")
    assert void == [ids[2] for ids in manager.block_ids("a")]
    assert manager.holds_any("a", void) and not manager.holds_any("a", [0, 19])
    assert len(manager.block_pool.block_by_hash) == 4


def test_output_tokens_fill_cached_blocks_too() -> None:
    manager = make_manager()
    compute(manager, "a", 6)
    go_on(manager, "a", 6, 8)
    assert find(manager, 9).num_tokens == 2 * SIZE


def test_statistics_are_handed_over_once() -> None:
    manager = make_manager()
    manager.record_lookup(12, 8)
    manager.record_lookup(5, 0)
    manager.reset_prefix_cache()
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (2, 17, 8, True)
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (0, 0, 0, False)


# Groups and windows


@pytest.mark.parametrize("step", [1, 7, 16])
@pytest.mark.parametrize("window", [1, 2, 8, 11])
def test_a_request_of_many_windows_holds_the_blocks_of_one_and_of_a_step(window: int, step: int) -> None:
    length = 20 * window + 40
    manager = make_manager(200, kinds=(FullAttention(), SlidingWindow(window)), step=step)
    bound = -(-(window - 1 + step) // SIZE) + 1
    assert manager.admit("a", length, find(manager, length))
    for computed in range(0, length, step):
        go_on(manager, "a", computed, min(computed + step, length), step)
        full, sliding = held(manager, "a")
        assert full == -(-length // SIZE) and sliding <= bound
    assert manager.config.blocks_for(length) == full + min(bound, full)
    go_on(manager, "a", length, length + 3 * window + SIZE)
    assert held(manager, "a")[1] <= -(-(window - 1) // SIZE) + 2
    manager.free("a")
    assert manager.usage == 0 and manager.block_pool.null_block.ref_cnt == 1


@pytest.mark.parametrize("num_cached", [0, 48])
def test_a_prompt_in_chunks_never_lacks_a_block_for_what_it_was_admitted_for(num_cached: int) -> None:
    for window in range(2, 20):
        for step in (1, 3, 4, 11):
            manager = make_manager(60, kinds=(SlidingWindow(window),), step=step)
            if num_cached:
                assert manager.admit("before", num_cached, find(manager, num_cached))
                go_on(manager, "before", 0, num_cached, step)
            assert manager.admit("a", 90, prefix := find(manager, 90))
            assert prefix.num_tokens == num_cached
            manager.block_pool.get_new_blocks(manager.num_free_blocks)  # nothing is left
            go_on(manager, "a", num_cached, 90, step)


def test_a_window_group_needs_only_the_last_windows_blocks_to_hit() -> None:
    manager = make_manager(40, kinds=(SlidingWindow(6),))
    compute(manager, "a", 32)
    manager.free("a")
    for index, block_hash in enumerate(hashes_of(32)):
        if index not in (4, 5, 6):
            block = manager.block_pool.get_cached_block(block_hash + b"\0")
            assert block is not None
            manager.block_pool.uncache(block)
    prefix = find(manager, 33)
    assert prefix.num_tokens == 28  # tokens 23 to 27 are read from there on: blocks 5 and 6
    assert [block.block_id for block in prefix.blocks[0]] == [0, 0, 0, 0, 0, 6, 7]
    assert compute(manager, "b", 33) == [[0, 0, 0, 0, 0, 6, 7, *manager.block_ids("b")[0][7:]]]


@pytest.mark.parametrize("window", [2, 5, 6, 9])
def test_a_window_longer_than_what_is_cached_needs_all_of_it(window: int) -> None:
    manager = make_manager(kinds=(SlidingWindow(window),))
    compute(manager, "a", 8)
    manager.free("a")
    first = manager.block_pool.get_cached_block(hashes_of(4)[0] + b"\0")
    assert first is not None
    manager.block_pool.uncache(first)
    assert find(manager, 9).num_tokens == (8 if window <= 5 else 0)


def test_the_groups_agree_on_the_longest_prefix() -> None:
    """Whatever is cached in each group, the prefix found is the longest that all can serve."""
    kinds = (FullAttention(), SlidingWindow(6), SlidingWindow(10))
    for seed in range(200):
        manager = make_manager(60, kinds=kinds)
        hashes = hashes_of(40)
        compute(manager, "a", 40)
        manager.free("a")
        cached = [
            [(seed * 7919 + group * 104729 + index * 31) % 11 > group + (index > 5) for index in range(len(hashes))]
            for group in range(len(kinds))
        ]
        for group, row in enumerate(cached):
            for index, stays in enumerate(row):
                block = manager.block_pool.get_cached_block(hashes[index] + bytes([group]))
                if not stays and block is not None:
                    manager.block_pool.uncache(block)
        expected = max(
            length
            for length in range(len(hashes))
            if all(
                all(row[kind.first_read(length * SIZE) // SIZE : length])
                for kind, row in zip(kinds, cached, strict=True)
            )
        )
        prefix = find(manager, 40)
        assert prefix.num_tokens == expected * SIZE
        for kind, blocks in zip(kinds, prefix.blocks, strict=True):
            first = kind.first_read(expected * SIZE) // SIZE
            assert [block.block_id == 0 for block in blocks] == [index < first for index in range(expected)]


def test_groups_do_not_share_blocks_with_each_other() -> None:
    manager = make_manager(kinds=(FullAttention(), FullAttention()))
    first, second = compute(manager, "a", 8)
    assert not set(first) & set(second)
    assert compute(manager, "b", 12) == [[*first, 5], [*second, 6]]


def test_no_prefix_loses_its_free_blocks_to_the_new_blocks_of_another_group() -> None:
    manager = make_manager(8, kinds=(FullAttention(), FullAttention()))
    compute(manager, "a", 8)
    manager.free("a")
    ids = compute(manager, "b", 12)
    assert sorted(ids[0] + ids[1]) == sorted(set(ids[0] + ids[1]))


def test_layers_are_grouped_so_that_little_of_a_block_is_unused() -> None:
    full, sliding, other = FullAttention(), SlidingWindow(512), SlidingWindow(64)
    gemma: list[LayerKind] = [sliding if (layer + 1) % 6 else full for layer in range(18)]
    groups = group_layers([(kind, "shape") for kind in gemma])
    assert sorted(layer for _, layers in groups for layer in layers) == list(range(18))
    assert all(gemma[layer] == kind for kind, layers in groups for layer in layers)

    def sizes(kinds: list[LayerKind]) -> list[int]:
        return [len(layers) for _, layers in group_layers([(kind, "shape") for kind in kinds])]

    assert sizes(gemma) == [3] * 6
    assert sizes([sliding] * 22 + [full] * 4) == [4, 4, 4, 4, 4, 2, 4]
    assert sizes([sliding] * 13 + [full] * 12) == [13, 12]
    assert sizes([full] * 30) == [30]
    assert sizes([sliding, other, sliding, full]) == [1, 1, 1, 1]
    assert group_layers([(full, 1), (full, 2), (full, 1)]) == [(full, [0]), (full, [2]), (full, [1])]


def test_the_longest_request_is_counted_over_all_groups() -> None:
    config = KVCacheConfig((FullAttention(), SlidingWindow(9)), SIZE, max_step_tokens=8)
    assert [config.blocks_for(num_tokens) for num_tokens in (0, 1, 4, 5, 16, 20, 24, 40)] == [0, 2, 2, 4, 8, 10, 11, 15]
    assert [config.longest_request(num_blocks, 64) for num_blocks in (0, 1, 2, 10, 11, 15, 1000)] == [
        0, 0, 4, 20, 24, 40, 64,
    ]  # fmt: skip
