"""Float32 matrices to GGUF's blocks, those by super-blocks too, which the gguf package only reads. Scales come from the
extremes of each block; llama.cpp's own quantiser searches for better ones. Layout and speed are the same."""

import gguf
import numpy as np

SUPER_BLOCK = 256
_IN_ITS_PLACE = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_VALUES_AT_ONCE = 1 << 24


def fitting(kind: str, columns: int) -> gguf.GGMLQuantizationType:
    """The kind, or what llama.cpp takes in its place where rows are not made of whole super-blocks."""
    return gguf.GGMLQuantizationType[_IN_ITS_PLACE.get(kind, kind) if columns % SUPER_BLOCK else kind]


def quantize(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """values: [n, k] float32. Returns [n, bytes of a row] uint8; floats of 4 or 2 bytes where `kind` is one of them."""
    step = max(_VALUES_AT_ONCE // values.shape[1], 1)
    slabs = [values[first : first + step] for first in range(0, len(values), step)]
    if kind.name not in _IN_ITS_PLACE:
        return np.concatenate([gguf.quants.quantize(slab, kind) for slab in slabs])
    write = _q6_k if kind.name == "Q6_K" else _q4_k if kind.name == "Q4_K" else _q5_k
    return np.concatenate([write(slab.reshape(-1, SUPER_BLOCK)).reshape(len(slab), -1) for slab in slabs])


def _q6_k(values: np.ndarray) -> np.ndarray:
    blocks = values.reshape(-1, 16, 16)
    scales = np.abs(blocks).max(2) / 31
    unit = _half(scales.max(1, keepdims=True) / 127)
    steps = _ratio(scales, unit).astype(np.int8)
    quants = np.clip(_ratio(blocks, (unit * steps)[..., None]), -32, 31).astype(np.int8).reshape(-1, 2, 4, 32) + 32
    quants = quants.astype(np.uint8)
    low = quants[:, :, :2] & 15 | (quants[:, :, 2:] & 15) << 4
    high = sum((quants[:, :, i] >> 4) << 2 * i for i in range(4))
    return _joined(low, high, steps.view(np.uint8), _bytes(unit))


def _affine(values: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The 16 bytes of scales, and values up to `top`: [n, 8, 32] uint8."""
    blocks = values.reshape(-1, 8, 32)
    minima = np.maximum(-blocks.min(2), 0)
    scales = (blocks.max(2) + minima) / top
    unit, minimum_unit = (_half(each.max(1, keepdims=True) / 63) for each in (scales, minima))
    s, m = (np.clip(_ratio(a, b), 0, 63).astype(np.uint8) for a, b in ((scales, unit), (minima, minimum_unit)))
    offsets = (minimum_unit * m)[..., None]
    quants = np.clip(_ratio(blocks + offsets, (unit * s)[..., None]), 0, top).astype(np.uint8)
    first = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (s, m)]
    return _joined(_bytes(unit), _bytes(minimum_unit), *first, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4), quants


def _q4_k(values: np.ndarray) -> np.ndarray:
    head, quants = _affine(values, 15)
    return _joined(head, quants[:, ::2] | quants[:, 1::2] << 4)


def _q5_k(values: np.ndarray) -> np.ndarray:
    head, quants = _affine(values, 31)
    high = sum((quants[:, i] >> 4) << i for i in range(8))
    return _joined(head, high, quants[:, ::2] & 15 | (quants[:, 1::2] & 15) << 4)


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8)


def _ratio(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return np.rint(np.divide(values, unit, out=np.zeros_like(values), where=unit != 0))


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
