"""Block hashes: equal exactly when block and all before it are equal."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from corespan.core.kv_cache.block_hash import BlockHasher


def hashes(
    token_ids: list[int], salt: str | None = None, embeds: np.ndarray | None = None, size: int = 4
) -> list[bytes]:
    found: list[bytes] = []
    BlockHasher(size).extend(found, token_ids, salt, embeds)
    return found


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert len(hashes(list(range(4)))[0]) == 32


def test_equal_blocks_behind_different_beginnings_differ() -> None:
    one, two = hashes([1, 2, 3, 4, 9, 9, 9, 9]), hashes([1, 2, 3, 5, 9, 9, 9, 9])
    assert one[0] != two[0] and one[1] != two[1]
    assert len(set(hashes([9] * 12))) == 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=40), st.lists(st.integers(1, 12), max_size=10))
def test_hashing_piece_by_piece_equals_hashing_at_once(token_ids: list[int], pieces: list[int]) -> None:
    found: list[bytes] = []
    hasher, end = BlockHasher(4), 0
    for piece in pieces:
        end += piece
        hasher.extend(found, token_ids[:end])
    hasher.extend(found, token_ids)
    assert found == hashes(token_ids)


def test_token_ids_cannot_be_confused_across_their_borders() -> None:
    lists = [[1, 23, 4, 5], [12, 3, 4, 5], [1, 2, 34, 5], [256, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert len({hashes(token_ids)[0] for token_ids in lists}) == len(lists)


def test_a_cache_salt_changes_every_block_and_is_told_apart_from_none() -> None:
    token_ids = list(range(8))
    salts = [None, "", "a", "b", "ab", "\udc80"]
    assert len({hashes(token_ids, salt)[0] for salt in salts}) == len(salts)
    assert len({hashes(token_ids, salt)[1] for salt in salts}) == len(salts)


def test_the_digest_of_an_adapter_changes_every_block_and_is_no_salt() -> None:
    def hashes(**keys: str) -> list[bytes]:
        found: list[bytes] = []
        BlockHasher(4).extend(found, list(range(8)), **keys)
        return found

    kinds = [hashes(), hashes(adapter_digest="a"), hashes(adapter_digest="b"), hashes(cache_salt="a")]
    kinds.append(hashes(cache_salt="a", adapter_digest="a"))
    assert len({each for found in kinds for each in found}) == 10
    assert hashes(adapter_digest="a") == kinds[1]


def test_prompt_embeddings_are_part_of_the_blocks_they_reach_into() -> None:
    embeds = np.arange(12, dtype=np.float32).reshape(6, 2)
    other = embeds.copy()
    other[5, 1] += 1
    zeros = [0] * 12
    mine, theirs, none = hashes(zeros, embeds=embeds), hashes(zeros, embeds=other), hashes(zeros)
    assert mine[0] == theirs[0]
    assert mine[1] != theirs[1]
    assert mine[2] != theirs[2]
    assert not set(mine) & set(none)


def test_a_strided_view_of_embeddings_hashes_like_its_copy() -> None:
    wide = np.arange(32, dtype=np.float32).reshape(4, 8)
    view = wide[:, ::2]
    assert hashes([0] * 4, embeds=view) == hashes([0] * 4, embeds=view.copy())
