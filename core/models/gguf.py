"""Reads the tensors of a GGUF file under their Hugging Face names. The metadata is read only as far as the tensors need
it: the vocabulary, which fills most of the header, is skipped."""

import mmap
import re
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from .gguf_quants import QUANT_TYPES, QuantType, dequantize
from .tensor_source import ALL_ROWS, TensorSource

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")

_WHOLE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(slots=True, frozen=True)
class GGUFTensor:
    """Where a tensor lies in the file. `interleaved_heads` > 0: its rows are in llama.cpp's rotary order."""

    shape: tuple[int, ...]
    quant_type: QuantType
    offset: int
    interleaved_heads: int

    @property
    def num_bytes(self) -> int:
        num_elements = 1
        for size in self.shape:
            num_elements *= size
        return num_elements // self.quant_type.block_size * self.quant_type.block_bytes


class GGUFSource(TensorSource):
    """A memory-mapped GGUF file. Raises ValueError where it is damaged or holds a format unknown here."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="gguf")
        with open(path, "rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError:
                raise ValueError(f"{path} is empty") from None
        try:
            self.tensors = _read_directory(self._map, path)
        except (struct.error, IndexError, UnicodeDecodeError, KeyError):
            raise ValueError(f"{path}: the GGUF header is damaged or cut short") from None
        self._check_extents()
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)

    def _check_extents(self) -> None:
        for name, tensor in self.tensors.items():
            end = tensor.offset + tensor.num_bytes
            if end > len(self._map):
                raise ValueError(f"{self.path} is truncated: {name} ends at byte {end}, the file at {len(self._map)}")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def block_kinds(self) -> Mapping[str, str]:
        return {name: tensor.quant_type.name for name, tensor in self.tensors.items()}

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        tensor = self.tensors[name]
        if len(tensor.shape) == 1:
            vector = dequantize(self._blocks(tensor), tensor.quant_type, dtype, self._pool).view(tensor.shape)
            return vector[_file_order(tensor)[rows]] if tensor.interleaved_heads else vector[rows]
        blocks = self.read_blocks(name, rows).view(-1, tensor.quant_type.block_bytes)
        return dequantize(blocks, tensor.quant_type, dtype, self._pool).view(-1, tensor.shape[-1])

    def read_blocks(self, name: str, rows: slice = ALL_ROWS) -> torch.Tensor:
        """Rows of a matrix as they lie in the file: [rows, bytes of a row] uint8."""
        tensor = self.tensors[name]
        blocks = self._blocks(tensor).view(tensor.shape[0], -1)
        return blocks[_file_order(tensor)[rows]] if tensor.interleaved_heads else blocks[rows]

    def _blocks(self, tensor: GGUFTensor) -> torch.Tensor:
        if self._bytes is None:
            raise ValueError(f"{self.path} is closed")
        span = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return span.view(-1, tensor.quant_type.block_bytes)

    def close(self) -> None:
        self._bytes = None
        self._pool.shutdown()


def _file_order(tensor: GGUFTensor) -> torch.Tensor:
    """[rows] int64: where each row lies in the file. Hugging Face's order has the first halves of a head's pairs before
    the second halves, llama.cpp's has pairs side by side.
    """
    pairs = torch.arange(tensor.shape[0]).unflatten(0, (tensor.interleaved_heads, -1, 2))
    return pairs.transpose(1, 2).flatten()


def _read_directory(buffer: mmap.mmap, path: str) -> dict[str, GGUFTensor]:
    """The tensors of the file by Hugging Face name (those without one keep their own)."""
    if buffer[:4] != _MAGIC:
        raise ValueError(f"{path} is not a GGUF file")
    version, num_tensors, num_fields = struct.unpack_from("<IQQ", buffer, 4)
    if version not in _VERSIONS:
        raise ValueError(f"{path} is GGUF version {version}; supported are {', '.join(map(str, _VERSIONS))}")
    metadata, position = _read_metadata(buffer, num_fields)
    entries = []
    for _ in range(num_tensors):
        name, position = _text(buffer, position)
        (num_dims,) = struct.unpack_from("<I", buffer, position)
        *sizes, number, offset = struct.unpack_from(f"<{num_dims}QIQ", buffer, position + 4)
        position += 16 + 8 * num_dims
        entries.append((name, tuple(reversed(sizes)), number, offset))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-position // alignment) * alignment
    tensors = {}
    for name, shape, number, offset in entries:
        quant_type = _quant_type(path, name, shape, number)
        heads = _interleaved_heads(name, metadata)
        tensors[_hugging_face_name(name)] = GGUFTensor(shape, quant_type, start + offset, heads)
    return tensors


def _quant_type(path: str, name: str, shape: tuple[int, ...], number: int) -> QuantType:
    quant_type = QUANT_TYPES.get(number)
    if quant_type is None:
        known = ", ".join(known.name for known in QUANT_TYPES.values())
        raise ValueError(f"{path}: tensor {name} has ggml type number {number}; supported are {known}")
    if not shape or shape[-1] % quant_type.block_size:
        raise ValueError(f"{path}: tensor {name} of shape {list(shape)} does not divide into {quant_type.name} blocks")
    return quant_type


def _interleaved_heads(name: str, metadata: Mapping[str, Any]) -> int:
    """llama.cpp reorders the query and key rows of the Llama architecture, and of no other."""
    if metadata.get("general.architecture") != "llama":
        return 0
    num_heads = metadata["llama.attention.head_count"]
    if re.fullmatch(r"blk\.\d+\.attn_q\.(weight|bias)", name):
        return int(num_heads)
    if re.fullmatch(r"blk\.\d+\.attn_k\.(weight|bias)", name):
        return int(metadata.get("llama.attention.head_count_kv", num_heads))
    return 0


def _hugging_face_name(name: str) -> str:
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_PARTS:
        return f"model.layers.{match[1]}.{_LAYER_PARTS[match[2]]}.{match[3]}"
    return _WHOLE_NAMES.get(name, name)


def _read_metadata(buffer: mmap.mmap, num_fields: int) -> tuple[dict[str, Any], int]:
    """Scalars and strings by key (arrays are skipped), and the position behind the last field."""
    metadata: dict[str, Any] = {}
    position = 24
    for _ in range(num_fields):
        key, position = _text(buffer, position)
        (kind,) = struct.unpack_from("<I", buffer, position)
        position += 4
        if kind == _STRING:
            metadata[key], position = _text(buffer, position)
        elif kind == _ARRAY:
            position = _skip_array(buffer, position)
        else:
            layout = struct.Struct("<" + _SCALARS[kind])
            (metadata[key],) = layout.unpack_from(buffer, position)
            position += layout.size
    return metadata, position


def _text(buffer: mmap.mmap, position: int) -> tuple[str, int]:
    start = position + 8
    end = start + _LENGTH.unpack_from(buffer, position)[0]
    if end > len(buffer):
        raise IndexError
    return buffer[start:end].decode(), end


def _skip_array(buffer: mmap.mmap, position: int) -> int:
    kind, count = struct.unpack_from("<IQ", buffer, position)
    position += 12
    if kind == _STRING:
        length_at = _LENGTH.unpack_from
        for _ in range(count):
            position += 8 + length_at(buffer, position)[0]
        return position
    if kind == _ARRAY:
        for _ in range(count):
            position = _skip_array(buffer, position)
        return position
    return position + count * struct.calcsize("<" + _SCALARS[kind])
