"""Pictures as callers give them, made RGB. Nothing is decoded before its size is known to be bearable."""

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from ...protocol.param_checks import reject

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 50_000_000
MAX_SIDE = 32_768
MAX_BYTES = 64 << 20
"""Of an encoded picture."""

_LEGAL = "a PIL image, or a uint8 array or tensor of [height, width], [height, width, 3] or [3, height, width]"


def decode(content: bytes, what: str) -> "Image.Image":
    """The picture in a file's bytes, upright. Raises VLLMValidationError for what is none, or too large."""
    from PIL import Image, ImageOps

    if len(content) > MAX_BYTES:
        reject(what, f"{len(content)} bytes", f"at most {MAX_BYTES} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(content))
            _check_size(picture.size, what)
            picture.load()
            return as_rgb(ImageOps.exif_transpose(picture), what)
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError, MemoryError, OverflowError) as error:
        reject(what, f"{len(content)} bytes", f"a picture that can be read: {error}")


def as_rgb(value: Any, what: str) -> "Image.Image":
    """A picture of the mode RGB, transparent parts over white. Raises VLLMValidationError naming `what`."""
    from PIL import Image

    if not isinstance(value, Image.Image):
        value = Image.fromarray(_as_array(value, what))
    picture: Image.Image = value
    _check_size(picture.size, what)
    try:
        if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    except (OSError, SyntaxError, ValueError, MemoryError) as error:
        reject(what, value, f"a picture that can be read: {error}")


def _as_array(value: Any, what: str) -> np.ndarray:
    """[height, width] or [height, width, 3 or 4] uint8."""
    if callable(getattr(value, "detach", None)):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        reject(what, type(value).__name__, _LEGAL)
    described = f"an array of {value.dtype} {list(value.shape)}"
    if value.dtype != np.uint8 or value.ndim not in (2, 3):
        reject(what, described, _LEGAL)
    if value.ndim == 3 and value.shape[-1] not in (1, 3, 4):
        if value.shape[0] not in (1, 3, 4):
            reject(what, described, _LEGAL)
        value = np.moveaxis(value, 0, -1)
    if value.ndim == 3 and value.shape[-1] == 1:
        value = value[..., 0]
    _check_size((value.shape[1], value.shape[0]), what)
    return np.ascontiguousarray(value)


def _check_size(size: tuple[int, int], what: str) -> None:
    width, height = size
    if min(size) < 1 or max(size) > MAX_SIDE or width * height > MAX_PIXELS:
        legal = f"from 1 to {MAX_SIDE} pixels wide and high, and at most {MAX_PIXELS} in all"
        reject(what, f"a picture of {width} x {height} pixels", legal)
