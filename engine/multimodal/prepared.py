"""What a model's processor makes of a picture."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from PIL import Image


class Prepared(NamedTuple):
    """pixels: [num_tiles, 3, height, width] float32, or ready embeddings, [num_embeds, hidden_size]. text: what stands
    in the prompt for them, `num_embeds` image tokens among it."""

    pixels: np.ndarray
    text: str
    num_embeds: int


class PictureProcessor(Protocol):
    """One model's. `image_token`: what a caller's prompt has in the place of a picture."""

    image_token: str
    image_token_id: int

    @property
    def max_embeds(self) -> int: ...

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None: ...

    def prepare(self, picture: "Image.Image", kwargs: Mapping[str, Any]) -> Prepared: ...

    def text_of_embeds(self, count: int) -> str: ...
