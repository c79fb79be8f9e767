"""Blocks for requests, and prefixes that are found again."""

from scheduling import greedy

from corespan.core.kv_cache.block_hash import BlockHasher
from corespan.core.kv_cache.kv_cache_manager import KVCacheManager
from corespan.core.scheduler.request import Request
from corespan.protocol.params import SamplingParams
from corespan.protocol.requests import EngineCoreRequest

SIZE = 4


def make_request(
    request_id: str, num_tokens: int, params: SamplingParams | None = None, cache_salt: str | None = None
) -> Request:
    message = EngineCoreRequest(request_id, list(range(num_tokens)), params or greedy(), cache_salt=cache_salt)
    return Request.from_engine_core_request(message, BlockHasher(SIZE))


def compute(manager: KVCacheManager, request: Request) -> list[int]:
    """Allocate and compute all of the request's tokens, as one step would."""
    cached = manager.get_computed_blocks(request)
    block_ids = manager.allocate_slots(request, request.num_tokens, cached)
    assert block_ids is not None
    manager.cache_blocks(request, request.num_tokens)
    manager.commit()
    return block_ids


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    for num_tokens, hits in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)):
        manager = KVCacheManager(20, SIZE, enable_caching=True)
        compute(manager, make_request("a", num_tokens))
        assert len(manager.get_computed_blocks(make_request("b", num_tokens))) == hits, num_tokens


def test_a_hit_shares_blocks_and_takes_new_ones_for_the_rest() -> None:
    manager = KVCacheManager(20, SIZE, enable_caching=True)
    first, second = make_request("a", 10), make_request("b", 12)
    assert compute(manager, first) == [1, 2, 3]
    assert compute(manager, second) == [1, 2, 4]
    assert [block.ref_cnt for block in second.blocks] == [2, 2, 1]


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    manager = KVCacheManager(6, SIZE, enable_caching=True)
    first = make_request("a", 12)
    compute(manager, first)
    manager.free(first)
    cached = manager.get_computed_blocks(make_request("b", 21))
    assert len(cached) == 3
    request = make_request("b", 21)
    assert manager.allocate_slots(request, 21, cached) is None
    assert manager.allocate_slots(request, 20, cached, keep_free=1) is None
    assert request.blocks == [] and manager.num_free_blocks == 5
    assert all(block.ref_cnt == 0 for block in cached)


def test_revived_blocks_count_as_taken() -> None:
    manager = KVCacheManager(4, SIZE, enable_caching=True)
    first = make_request("a", 8)
    compute(manager, first)
    manager.free(first)
    second = make_request("b", 12)
    assert manager.allocate_slots(second, 12, manager.get_computed_blocks(second)) is not None
    assert manager.num_free_blocks == 0


def test_freed_blocks_are_evicted_from_the_end_of_the_text() -> None:
    manager = KVCacheManager(4, SIZE, enable_caching=True)
    first = make_request("a", 12)
    compute(manager, first)
    manager.free(first)
    other = make_request("b", 4, cache_salt="other")
    compute(manager, other)
    assert len(manager.get_computed_blocks(make_request("c", 13))) == 2


def test_requests_that_want_prompt_logprobs_or_say_so_do_not_read_the_cache() -> None:
    manager = KVCacheManager(20, SIZE, enable_caching=True)
    compute(manager, make_request("a", 12))
    for params in (
        greedy(prompt_logprobs=1),
        greedy(prompt_logprobs=0, skip_reading_prefix_cache=False),
        greedy(skip_reading_prefix_cache=True),
    ):
        assert manager.get_computed_blocks(make_request("b", 12, params)) == []
    assert len(manager.get_computed_blocks(make_request("b", 12))) == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = KVCacheManager(20, SIZE, enable_caching=False)
    compute(manager, make_request("a", 12))
    assert manager.get_computed_blocks(make_request("b", 12)) == []
    assert manager.block_pool.num_cached_blocks == 0


def test_a_different_salt_shares_nothing() -> None:
    manager = KVCacheManager(20, SIZE, enable_caching=True)
    compute(manager, make_request("a", 12, cache_salt="x"))
    assert manager.get_computed_blocks(make_request("b", 12)) == []
    assert manager.get_computed_blocks(make_request("b", 12, cache_salt="y")) == []
    assert len(manager.get_computed_blocks(make_request("b", 12, cache_salt="x"))) == 2


def test_blocks_of_a_step_that_did_not_happen_are_not_found() -> None:
    manager = KVCacheManager(20, SIZE, enable_caching=True)
    request = make_request("a", 12)
    manager.allocate_slots(request, 12)
    manager.cache_blocks(request, 8)
    manager.commit()
    manager.cache_blocks(request, 12)
    assert manager.revoke("a") == [request.blocks[2].block_id]
    assert manager.block_pool.num_cached_blocks == 2


def test_output_tokens_fill_cached_blocks_too() -> None:
    manager = KVCacheManager(20, SIZE, enable_caching=True)
    request = make_request("a", 6)
    compute(manager, request)
    request.limit_length(100)
    for token_id in (6, 7, 8):
        request.append_output_token(token_id)
    compute_to = request.num_tokens - 1
    manager.allocate_slots(request, compute_to)
    manager.cache_blocks(request, compute_to)
    manager.commit()
    assert len(manager.get_computed_blocks(make_request("b", 9))) == 2


def test_statistics_are_handed_over_once() -> None:
    manager = KVCacheManager(20, SIZE, enable_caching=True)
    manager.record_lookup(12, 8)
    manager.record_lookup(5, 0)
    manager.reset_prefix_cache()
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (2, 17, 8, True)
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (0, 0, 0, False)
