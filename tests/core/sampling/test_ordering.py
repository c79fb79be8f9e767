"""Largest entries: by value, then by lower id, whatever the shape."""

import numpy as np
import pytest
import torch

from corespan.core.sampling import ordering


def expected_order(row: torch.Tensor) -> np.ndarray:
    return np.lexsort((np.arange(len(row)), -row.numpy()))


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000, 20_000])
@pytest.mark.parametrize("levels", [3, 10_000_000], ids=["many ties", "no ties"])
def test_top_k_orders_by_value_then_by_id(vocab_size: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-levels, levels, (5, vocab_size), generator=generator).float() / 7
    padded = ordering.pad_to_blocks(logits)
    maxima = ordering.block_max(padded)
    for k in {1, min(5, vocab_size), min(70, vocab_size), vocab_size}:
        values, ids = ordering.top_k(padded, maxima, k)
        for row in range(5):
            expected = expected_order(logits[row])[:k]
            assert ids[row].tolist() == expected.tolist()
            assert values[row].tolist() == logits[row][expected].tolist()


def test_the_largest_is_the_first_of_equals() -> None:
    logits = torch.zeros(2, 200)
    logits[0, [70, 130]] = 4.0
    padded = ordering.pad_to_blocks(logits)
    ids, values = ordering.argmax(padded, ordering.block_max(padded))
    assert (ids.tolist(), values.tolist()) == ([70, 0], [4.0, 0.0])


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0]])
    padded = ordering.pad_to_blocks(logits)
    assert ordering.top_k(padded, ordering.block_max(padded), 3)[1].tolist() == [[0, 1, 2]]


def test_masked_entries_come_last_and_padding_after_them() -> None:
    logits = torch.full((1, 70), float("-inf"))
    logits[0, 69] = -5.0
    padded = ordering.pad_to_blocks(logits)
    assert ordering.top_k(padded, ordering.block_max(padded), 70)[1].tolist() == [[69, *range(69)]]
