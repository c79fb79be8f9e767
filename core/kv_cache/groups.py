"""KV groups: layers that keep the same blocks, and what a request holds of each kind of layer.

The worker says which groups its model has; `KVCacheManager` keeps a table of blocks a group, `core/kv_sizing.py` counts
by them. A new kind of layer is one more class here.
"""

import bisect
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ...protocol.config import VllmConfig


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token attends to all tokens before it."""

    def first_read(self, num_computed: int) -> int:
        """The first token that is still attended to once so many are computed."""
        return 0

    def most_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at once, at most."""
        return -(-num_tokens // block_size)

    def longest_prefix(self, is_cached: Callable[[int], bool], limit: int, block_size: int) -> int:
        """The largest number of blocks, up to `limit`, that can be left out because all that is read of them later is
        cached. `is_cached` takes a block's index."""
        return next((index for index in range(limit) if not is_cached(index)), limit)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Every token attends to itself and the `window - 1` tokens before it. Methods as of `FullAttention`."""

    window: int

    def first_read(self, num_computed: int) -> int:
        return max(0, num_computed - self.window + 1)

    def most_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        # One more, since what is read need not begin at a block's beginning.
        at_once = -(-(self.window - 1 + max_step_tokens) // block_size) + 1
        return min(-(-num_tokens // block_size), at_once)

    def longest_prefix(self, is_cached: Callable[[int], bool], limit: int, block_size: int) -> int:
        length, index = limit, limit - 1
        while index >= self.first_read(length * block_size) // block_size:
            if not is_cached(index):
                length = index
            index -= 1
        return length


LayerKind = FullAttention | SlidingWindow


def group_layers(layers: Sequence[tuple[LayerKind, Hashable]]) -> list[tuple[LayerKind, list[int]]]:
    """Groups of layers of one kind and one shape, which may be anything: each group's kind, and its layers by index.

    A block has room for as many layers as the largest group, and leaves some unused where a group has fewer. So the
    rarest or the commonest sort's number of layers becomes the groups' size, whichever leaves less unused: 15 sliding
    and 3 full layers make six groups of 3.
    """
    alike: dict[tuple[LayerKind, Hashable], list[int]] = {}
    for index, layer in enumerate(layers):
        alike.setdefault(layer, []).append(index)
    counts = sorted(map(len, alike.values()))
    size = min((counts[0], counts[-1]), key=lambda size: sum(-(-count // size) * size for count in counts))
    return [
        (kind, indices[first : first + size])
        for (kind, _), indices in alike.items()
        for first in range(0, len(indices), size)
    ]


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What numbers of blocks depend on: the kind of each group's layers, the tokens of a block, and how many tokens of
    one request a step computes at most."""

    kinds: tuple[LayerKind, ...]
    block_size: int
    max_step_tokens: int

    @classmethod
    def of(cls, vllm_config: VllmConfig, kinds: Sequence[LayerKind]) -> "KVCacheConfig":
        scheduler = vllm_config.scheduler_config
        limits = (scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold or sys.maxsize)
        return cls(tuple(kinds), vllm_config.cache_config.block_size, min(limits))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at once, at most, over all groups."""
        return sum(kind.most_blocks(num_tokens, self.block_size, self.max_step_tokens) for kind in self.kinds)

    def longest_request(self, num_blocks: int, limit: int) -> int:
        """The largest number of tokens, up to `limit`, for which `num_blocks` suffice."""
        sizes = range(self.block_size, limit + self.block_size, self.block_size)
        return min(limit, bisect.bisect_right(sizes, num_blocks, key=self.blocks_for) * self.block_size)
