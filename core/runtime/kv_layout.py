"""How a model's layers share the memory of KV blocks. Each runtime lays its cache out by it."""

from collections.abc import Sequence

from ..attention.interface import AttentionBackend, KVCache
from ..kv_cache.groups import FullAttention, LayerKind, SlidingWindow, group_layers
from ..models.spec import AttentionSpec, ModelSpec


class KVLayout:
    """By group: `kinds`. By layer: `group_of`, whose blocks it keeps.

    The n-th layers of all groups share one tensor, in which each group uses the blocks that the pool gave it; layers
    with heads of another shape have tensors of their own.
    """

    def __init__(self, spec: ModelSpec) -> None:
        attention = [layer.attention for layer in spec.layers]
        groups = group_layers([(_kind(each), (each.num_kv_heads, each.head_dim)) for each in attention])
        self.kinds: tuple[LayerKind, ...] = tuple(kind for kind, _ in groups)
        place = {layer: (group, n) for group, (_, layers) in enumerate(groups) for n, layer in enumerate(layers)}
        self.group_of = [place[layer][0] for layer in range(len(attention))]
        self._tensor_of = [(place[layer][1], each.num_kv_heads, each.head_dim) for layer, each in enumerate(attention)]

    def block_bytes(self, backends: Sequence[AttentionBackend]) -> int:
        """Of one block in all tensors. backends: one a layer."""
        return sum(
            {tensor: each.bytes_per_block for tensor, each in zip(self._tensor_of, backends, strict=True)}.values()
        )

    def allocate(self, backends: Sequence[AttentionBackend], num_blocks: int) -> list[KVCache]:
        """A cache a layer; layers that share a tensor have the same."""
        tensors: dict[object, KVCache] = {}
        for tensor, backend in zip(self._tensor_of, backends, strict=True):
            if tensor not in tensors:
                tensors[tensor] = backend.allocate(num_blocks)
        return [tensors[tensor] for tensor in self._tensor_of]


def _kind(attention: AttentionSpec) -> LayerKind:
    """A window that reaches forward too is of models whose requests take one step: nothing falls out of it."""
    if attention.window is None or attention.bidirectional:
        return FullAttention()
    return SlidingWindow(attention.window)
