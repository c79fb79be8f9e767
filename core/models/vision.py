"""A vision tower as data: what turns a picture's tiles into embeddings of the language model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class VisionSpec:
    """A SigLIP encoder over square tiles, and the connector behind it, which puts the patches of each square of
    `factor` x `factor` side by side and projects them.

    tower, connector: how the names of their tensors begin. text: pairs of how those of the language model do, and of
    what stands there in a checkpoint of it alone.
    """

    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    eps: float
    output_size: int
    factor: int
    tower: str
    connector: str
    text: tuple[tuple[str, str], ...]

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.patches_per_side**2

    @property
    def embeds_per_tile(self) -> int:
        return self.num_patches // self.factor**2


def read_siglip(config: Mapping[str, Any]) -> dict[str, Any]:
    """The tower's fields of a `VisionSpec`, of a `vision_config`. Raises ValueError for what no tower here has."""
    activation = config.get("hidden_act", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"vision_config.hidden_act is {activation!r}; supported is 'gelu_pytorch_tanh'")
    image_size, patch_size = int(config.get("image_size", 224)), int(config.get("patch_size", 32))
    num_heads, hidden_size = int(config.get("num_attention_heads", 16)), int(config.get("hidden_size", 1152))
    if hidden_size % num_heads:
        raise ValueError(f"vision_config.hidden_size ({hidden_size}) is no multiple of its {num_heads} heads")
    return {
        "hidden_size": hidden_size,
        "inner_size": int(config.get("intermediate_size", 3072)),
        "num_layers": int(config.get("num_hidden_layers", 12)),
        "num_heads": num_heads,
        "image_size": image_size,
        "patch_size": patch_size,
        "eps": float(config.get("layer_norm_eps", 1e-6)),
    }
