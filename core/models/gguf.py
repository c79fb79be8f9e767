"""Reads the tensors of a GGUF file, or of all parts of a split one, under their Hugging Face names."""

from __future__ import annotations

import functools
import mmap
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...shared.gguf_file import Figures, GGUFHeader, TensorPlace, read_gguf
from ..lazy_torch import torch
from .gguf_quants import QUANT_TYPES, QuantType, dequantize
from .tensor_source import ALL_ROWS, TensorSource

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
_GEMMA = ("gemma2", "gemma3")
_GEMMA_LAYER_PARTS = _LAYER_PARTS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(slots=True, frozen=True)
class GGUFTensor:
    """Where a tensor lies and in which format. `interleaved_heads` > 0: its rows are in llama.cpp's rotary order.
    `offset`: what llama.cpp's converter has added to the values."""

    place: TensorPlace
    quant_type: QuantType
    interleaved_heads: int
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

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
        self.tensors = _tensors(read_gguf(path, vocabulary=False))
        self._sizes = {file: os.stat(file).st_size for file in {each.place.path for each in self.tensors.values()}}
        self._check_extents()
        self._bytes: dict[str, torch.Tensor] = {}  # of the files that something was read from
        self._closed = False

    @property
    def files(self) -> list[str]:
        return sorted(self._sizes)

    def _check_extents(self) -> None:
        for name, tensor in self.tensors.items():
            file, end = tensor.place.path, tensor.place.offset + tensor.num_bytes
            if end > self._sizes[file]:
                raise ValueError(f"{file} is truncated: {name} ends at byte {end}, the file at {self._sizes[file]}")

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="gguf")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def block_kinds(self) -> Mapping[str, str]:
        return {name: tensor.quant_type.name for name, tensor in self.tensors.items()}

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        tensor = self.tensors[name]
        if len(tensor.shape) == 1:
            vector = dequantize(self._blocks(tensor), tensor.quant_type, torch.float32, self._pool).view(tensor.shape)
            vector = (vector - tensor.offset).to(dtype)
            return vector[_file_order(tensor)[rows]] if tensor.interleaved_heads else vector[rows]
        blocks = self.read_blocks(name, rows).view(-1, tensor.quant_type.block_bytes)
        return dequantize(blocks, tensor.quant_type, dtype, self._pool).view(-1, tensor.shape[-1])

    def read_blocks(self, name: str, rows: slice = ALL_ROWS) -> torch.Tensor:
        """Rows of a matrix as they lie in the file: [rows, bytes of a row] uint8."""
        tensor = self.tensors[name]
        blocks = self._blocks(tensor).view(tensor.shape[0], -1)
        return blocks[_file_order(tensor)[rows]] if tensor.interleaved_heads else blocks[rows]

    def _blocks(self, tensor: GGUFTensor) -> torch.Tensor:
        path = tensor.place.path
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        if path not in self._bytes:
            self._bytes[path] = _mapped(path)
        span = self._bytes[path][tensor.place.offset : tensor.place.offset + tensor.num_bytes]
        return span.view(-1, tensor.quant_type.block_bytes)

    def close(self) -> None:
        self._closed = True
        self._bytes.clear()
        if "_pool" in self.__dict__:
            self._pool.shutdown()


def _file_order(tensor: GGUFTensor) -> torch.Tensor:
    return llama_row_order(tensor.shape[0], tensor.interleaved_heads)


def llama_row_order(rows: int, num_heads: int) -> torch.Tensor:
    """[rows] int64: where each row lies in the file. Hugging Face's order has the first halves of a head's pairs before
    the second halves, llama.cpp's has pairs side by side.
    """
    pairs = torch.arange(rows).unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten()


def gguf_module(name: str) -> str:
    """The Hugging Face name of a matrix, both without ".weight"."""
    return _hugging_face_name(f"{name}.weight", _LAYER_PARTS).removesuffix(".weight")


def _mapped(path: str) -> torch.Tensor:
    """The file's bytes, writable as torch wants them; writes would stay in memory."""
    with open(path, "rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _tensors(header: GGUFHeader) -> dict[str, GGUFTensor]:
    """The tensors of the file by Hugging Face name (those without one keep their own)."""
    is_gemma = header.metadata.get("general.architecture") in _GEMMA
    layer_parts = _GEMMA_LAYER_PARTS if is_gemma else _LAYER_PARTS
    return {
        _hugging_face_name(name, layer_parts): GGUFTensor(
            place,
            _quant_type(place, name),
            _interleaved_heads(name, header.metadata),
            offset=1.0 if is_gemma and name.endswith("norm.weight") else 0.0,
        )
        for name, place in header.tensors.items()
    }


def _quant_type(place: TensorPlace, name: str) -> QuantType:
    path, shape, number = place.path, place.shape, place.type_number
    quant_type = QUANT_TYPES.get(number)
    if quant_type is None:
        known = ", ".join(known.name for known in QUANT_TYPES.values())
        raise ValueError(f"{path}: tensor {name} has ggml type number {number}; supported are {known}")
    if not shape or shape[-1] % quant_type.block_size:
        raise ValueError(f"{path}: tensor {name} of shape {list(shape)} does not divide into {quant_type.name} blocks")
    return quant_type


def _interleaved_heads(name: str, metadata: Mapping[str, object]) -> int:
    """llama.cpp reorders the query and key rows of the Llama architecture, and of no other."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    if match is None or metadata.get("general.architecture") != "llama":
        return 0
    figures = Figures(metadata, "llama")
    num_heads = figures.whole("attention.head_count")
    return num_heads if match[1] == "q" else figures.whole("attention.head_count_kv", num_heads)


def _hugging_face_name(name: str, layer_parts: Mapping[str, str]) -> str:
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in layer_parts:
        return f"model.layers.{match[1]}.{layer_parts[match[2]]}.{match[3]}"
    return _WHOLE_NAMES.get(name, name)
