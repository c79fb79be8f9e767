"""Pictures for Idefics3 and SmolVLM, as transformers prepares them with Pillow: scaled, cut into tiles, and the whole
once more as the last tile; and the text that stands for them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...protocol.param_checks import reject
from .prepared import Prepared

if TYPE_CHECKING:
    from PIL import Image

_MAX_SIDE = 4096
_HALVES = (0.5, 0.5, 0.5)
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "do_pad": True}


@dataclass(frozen=True, slots=True)
class _Options:
    longest_edge: int
    splits: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int


class Idefics3Processor:
    """`image_token`: what a prompt has in the place of a picture."""

    image_token = "<image>"

    def __init__(self, hf_config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """settings: of the model's `preprocessor_config.json`. Raises VLLMValidationError."""
        vision = hf_config["vision_config"]
        self.image_token_id = int(hf_config["image_token_id"])
        self._side = int(vision["image_size"])
        self._embeds_per_tile = (self._side // int(vision["patch_size"])) ** 2 // int(hf_config["scale_factor"]) ** 2
        tile = settings.get("max_image_size") or {"longest_edge": 364}
        if tile.get("longest_edge") != self._side:
            reject("max_image_size", tile, f"{{'longest_edge': {self._side}}}, a tile's side in the model's config")
        for name, value in _FIXED.items():
            if settings.get(name, value) != value:
                reject(name, settings[name], repr(value))
        options = _Options(4 * 364, True, _HALVES, _HALVES, 1)
        own = ("size", "do_image_splitting", "image_mean", "image_std", "resample")
        self._options = _merged(options, {name: settings[name] for name in own if settings.get(name) is not None})

    @property
    def max_embeds(self) -> int:
        """The most that a picture can be."""
        if not self._options.splits:
            return self._embeds_per_tile
        per_side = math.ceil(min(self._options.longest_edge + 1, _MAX_SIDE) / self._side)
        return (per_side**2 + 1) * self._embeds_per_tile

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises VLLMValidationError for mm_processor_kwargs that are none."""
        _merged(self._options, kwargs)

    def prepare(self, picture: "Image.Image", kwargs: Mapping[str, Any]) -> Prepared:
        """picture: of the mode RGB."""
        options = _merged(self._options, kwargs)
        picture = self._resized(picture, _scaled(picture.size, options.longest_edge), options)
        if options.splits:
            tiles, rows, columns = self._split(picture, options)
        else:
            tiles, rows, columns = [self._resized(picture, (self._side, self._side), options)], 0, 0
        pixels = np.stack([_normalised(tile, options) for tile in tiles])
        return Prepared(pixels, self._text(rows, columns, self._embeds_per_tile), len(tiles) * self._embeds_per_tile)

    def text_of_embeds(self, count: int) -> str:
        """What stands for so many ready embeddings."""
        return self._text(0, 0, count)

    def _split(self, picture: "Image.Image", options: _Options) -> tuple[list["Image.Image"], int, int]:
        side = self._side
        picture = self._resized(picture, _up_to_multiples(picture.size, side), options)
        width, height = picture.size
        if width <= side and height <= side:
            return [picture], 0, 0
        rows, columns = height // side, width // side
        tiles = [
            picture.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
        return [*tiles, self._resized(picture, (side, side), options)], rows, columns

    def _resized(self, picture: "Image.Image", size: tuple[int, int], options: _Options) -> "Image.Image":
        return picture.resize(size, resample=options.resample)

    def _text(self, rows: int, columns: int, embeds_per_tile: int) -> str:
        image, mark = self.image_token * embeds_per_tile, "<fake_token_around_image>"
        text = ""
        for row in range(1, rows + 1):
            text += "".join(f"{mark}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
        return f"{text}{chr(10) if rows else ''}{mark}<global-img>{image}{mark}"


def _merged(options: _Options, kwargs: Mapping[str, Any]) -> _Options:
    for name, value in kwargs.items():
        where = f"mm_processor_kwargs[{name!r}]"
        if name == "size":
            edge = value.get("longest_edge") if isinstance(value, Mapping) else None
            if type(edge) is not int or not 1 <= edge <= _MAX_SIDE:
                reject(where, value, f"{{'longest_edge': an integer from 1 to {_MAX_SIDE}}}")
            options = replace(options, longest_edge=edge)
        elif name == "do_image_splitting":
            if not isinstance(value, bool):
                reject(where, value, "True or False")
            options = replace(options, splits=value)
        elif name in ("image_mean", "image_std"):
            if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(_is_number(each) for each in value):
                reject(where, value, "three numbers")
            if name == "image_std" and 0 in value:
                reject(where, value, "three numbers other than 0")
            numbers = tuple(map(float, value))
            options = replace(options, mean=numbers) if name == "image_mean" else replace(options, std=numbers)
        elif name == "resample":
            if type(value) is not int or not 0 <= value <= 5:
                reject(where, value, "the number of one of Pillow's filters, 0 to 5")
            options = replace(options, resample=value)
        else:
            reject("mm_processor_kwargs", {name: value}, "size, do_image_splitting, image_mean, image_std and resample")
    return options


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _scaled(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """(width, height) with the longer side as long as that, and the other even; none beyond the limit."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MAX_SIDE:
        width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
    elif height > width and height > _MAX_SIDE:
        width, height = int(_MAX_SIDE * ratio), _MAX_SIDE
    return max(width, 1), max(height, 1)


def _up_to_multiples(size: tuple[int, int], side: int) -> tuple[int, int]:
    width, height = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return width, height


def _normalised(tile: "Image.Image", options: _Options) -> np.ndarray:
    """[3, height, width] float32, rounded where transformers rounds."""
    scaled = (np.asarray(tile).astype(np.float64) * (1 / 255)).astype(np.float32)
    mean, std = np.array(options.mean, dtype=np.float32), np.array(options.std, dtype=np.float32)
    return np.ascontiguousarray(((scaled - mean) / std).transpose(2, 0, 1))
