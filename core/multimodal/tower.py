"""The vision tower in torch: tiles in, embeddings for the language model out. Read and run by `encoder.py`."""

from __future__ import annotations

from ..lazy_torch import inference_mode, torch
from ..models.tensor_source import TensorSource, check_tensors
from ..models.vision import VisionSpec

_TILES_AT_ONCE = 4


def expected_tensors(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of tower and connector, with its shape."""
    size, inner = spec.hidden_size, spec.inner_size
    tensors: dict[str, tuple[int, ...]] = {
        f"{spec.tower}.embeddings.patch_embedding.weight": (size, 3, spec.patch_size, spec.patch_size),
        f"{spec.tower}.embeddings.patch_embedding.bias": (size,),
        f"{spec.tower}.embeddings.position_embedding.weight": (spec.num_patches, size),
        f"{spec.tower}.post_layernorm.weight": (size,),
        f"{spec.tower}.post_layernorm.bias": (size,),
    }
    matrices = {f"self_attn.{name}": (size, size) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    matrices |= {"mlp.fc1": (inner, size), "mlp.fc2": (size, inner)}
    for layer in range(spec.num_layers):
        prefix = f"{spec.tower}.encoder.layers.{layer}"
        for name, shape in matrices.items():
            tensors[f"{prefix}.{name}.weight"], tensors[f"{prefix}.{name}.bias"] = shape, shape[:1]
        for name in ("layer_norm1", "layer_norm2"):
            tensors[f"{prefix}.{name}.weight"] = tensors[f"{prefix}.{name}.bias"] = (size,)
    tensors[f"{spec.connector}.weight"] = (spec.output_size, size * spec.factor**2)
    return tensors


def num_bytes(spec: VisionSpec, dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in expected_tensors(spec).values()) * dtype.itemsize


class VisionTower:
    """A picture's embeddings do not depend on other pictures: its tiles are run by themselves, a few at a time."""

    def __init__(self, spec: VisionSpec, dtype: torch.dtype, source: TensorSource) -> None:
        """Raises ValueError naming the tensors that `source` lacks, has in excess, or has in another shape."""
        expected = expected_tensors(spec)
        check_tensors(source, expected)
        self.spec = spec
        self.dtype = dtype
        self._weights = {name: source.read(name, dtype).clone() for name in expected}
        self._positions = _positions(spec)

    @inference_mode
    def embed(self, tiles: torch.Tensor) -> torch.Tensor:
        """tiles: [num_tiles, 3, image_size, image_size] float32. Returns [num_tiles * embeds_per_tile, output_size]."""
        return torch.cat([self._embed(part.to(self.dtype)) for part in tiles.split(_TILES_AT_ONCE)])

    def _embed(self, tiles: torch.Tensor) -> torch.Tensor:
        tower, weights = self.spec.tower, self._weights
        patches = torch.nn.functional.conv2d(
            tiles,
            weights[f"{tower}.embeddings.patch_embedding.weight"],
            weights[f"{tower}.embeddings.patch_embedding.bias"],
            stride=self.spec.patch_size,
        )
        hidden = patches.flatten(2).transpose(1, 2)
        hidden = hidden + weights[f"{tower}.embeddings.position_embedding.weight"][self._positions]
        for layer in range(self.spec.num_layers):
            hidden = self._layer(f"{tower}.encoder.layers.{layer}", hidden)
        hidden = self._norm(f"{tower}.post_layernorm", hidden)
        return self._connect(hidden).flatten(0, 1)

    def _layer(self, prefix: str, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_tiles, num_patches, hidden_size]."""
        normed = self._norm(f"{prefix}.layer_norm1", hidden)
        q, k, v = (
            self._linear(f"{prefix}.self_attn.{name}", normed).unflatten(-1, (self.spec.num_heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        hidden = hidden + self._linear(f"{prefix}.self_attn.out_proj", attended)
        normed = self._norm(f"{prefix}.layer_norm2", hidden)
        inner = torch.nn.functional.gelu(self._linear(f"{prefix}.mlp.fc1", normed), approximate="tanh")
        return hidden + self._linear(f"{prefix}.mlp.fc2", inner)

    def _connect(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_tiles, num_patches, hidden_size]. Returns [num_tiles, embeds_per_tile, output_size]."""
        spec = self.spec
        side, factor = spec.patches_per_side, spec.factor
        squares = hidden.view(len(hidden), side // factor, factor, side // factor, factor, spec.hidden_size)
        joined = squares.transpose(2, 3).reshape(len(hidden), spec.embeds_per_tile, -1)
        return torch.nn.functional.linear(joined, self._weights[f"{spec.connector}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], self.spec.eps
        )

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])


def _positions(spec: VisionSpec) -> torch.Tensor:
    """[num_patches] int64. The tower was made for pictures of any size: it finds a patch's row and column by where it
    lies between 0 and 1, which for some sizes rounds a patch into its neighbour's place."""
    side = spec.patches_per_side
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    places = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    buckets = torch.bucketize(places, boundaries, right=True)
    return (buckets[:, None] * side + buckets).flatten()
