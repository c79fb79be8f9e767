"""What of a prompt is no text: pictures, prepared by the shell, and where their embeddings stand among the tokens."""

from collections.abc import Sequence

import msgspec
import numpy as np

PIXELS = "pixel_values"
EMBEDS = "image_embeds"


class PlaceholderRange(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, eq=False):
    """The tokens from `offset` on, `length` of them, that stand for one item.

    `is_embed`: [length] bool, which of them are embeddings of the item; None: all. The others are text between them.
    """

    offset: int
    length: int
    is_embed: np.ndarray | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        return self.length if self.is_embed is None else int(np.count_nonzero(self.is_embed))

    def embed_positions(self) -> np.ndarray:
        """[num_embeds] int64, among the prompt's tokens."""
        offsets = np.arange(self.length) if self.is_embed is None else np.flatnonzero(self.is_embed)
        return offsets + self.offset


class MultiModalFeatureSpec(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, eq=False):
    """One item. `identifier`: the same for what gives the same embeddings, and for nothing else.

    `data`: "pixel_values" [num_tiles, 3, height, width], or "image_embeds" [num_embeds, hidden_size], float32; None
    where the core is believed to have it.
    """

    modality: str
    identifier: str
    mm_position: PlaceholderRange
    data: dict[str, np.ndarray] | None = None


def check_order(features: Sequence[MultiModalFeatureSpec], num_tokens: int) -> None:
    """Raises ValueError for items that overlap, come in another order, or lie outside of the prompt."""
    end = 0
    for feature in features:
        position = feature.mm_position
        mask = position.is_embed
        if mask is not None and (mask.dtype != bool or mask.shape != (position.length,)):
            raise ValueError("mm_features: is_embed must be a bool for each token of its item")
        if position.offset < end or position.num_embeds < 1:
            raise ValueError("mm_features must come in the order of their tokens, without overlaps, none of them empty")
        end = position.end
    if end > num_tokens:
        raise ValueError(f"mm_features end at token {end} of a prompt of {num_tokens}")
