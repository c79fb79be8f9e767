"""What an encoder of BERT's kind is, and its weights: tokens attend in both directions, and nothing is cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

from ..lazy_torch import torch
from .tensor_source import TensorSource, check_tensors

M = TypeVar("M")

EncoderActivation = Literal["gelu", "gelu_tanh", "relu"]

_PREFIXES = ("", "bert.", "roberta.")
_UNREAD = ("cls.", "lm_head.", "classifier.", "pooler.")
"""What stands beside the encoder: heads for masked words, and what the pooler reads."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Embeddings of words, places and types, then blocks that are normalised behind each sum.

    padding_id: places are counted from `padding_id + 1` on, over the tokens that are not this one, as RoBERTa does;
    None: from 0. num_positions: rows of the table of places.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    num_positions: int
    num_token_types: int
    norm_eps: float
    activation: EncoderActivation = "gelu"
    padding_id: int | None = None
    vision: ClassVar[None] = None


@dataclass(slots=True)
class Norm:
    """LayerNorm: weight and bias, [size]."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(slots=True)
class EncoderLayer(Generic[M]):
    """qkv: queries, keys and values on top of one another; the other matrices as in the block's order."""

    qkv: M
    attention_output: M
    attention_norm: Norm
    inner: M
    output: M
    output_norm: Norm


@dataclass(slots=True)
class EncoderWeights(Generic[M]):
    spec: EncoderSpec
    words: torch.Tensor
    positions: torch.Tensor
    token_types: torch.Tensor
    norm: Norm
    layers: list[EncoderLayer[M]]


def encoder_bytes(spec: EncoderSpec, itemsize: int) -> int:
    """Bytes of all tensors, at so many a value."""
    return itemsize * sum(rows * columns for rows, columns in map(_as_matrix, _shapes(spec, "").values()))


def load_encoder(
    spec: EncoderSpec, source: TensorSource, dtype: torch.dtype, matrix: Callable[[torch.Tensor, torch.Tensor], M]
) -> EncoderWeights[M]:
    """`matrix` makes what multiplies of a weight [rows, columns] and a bias [rows].

    Raises ValueError naming the tensors that `source` lacks, has in excess, or has in another shape.
    """
    prefix = next((each for each in _PREFIXES if f"{each}embeddings.word_embeddings.weight" in source.shapes), "")
    unread = (*_UNREAD, *(f"{prefix}{name}" for name in _UNREAD))
    check_tensors(source, _shapes(spec, prefix), frozenset(name for name in source.shapes if name.startswith(unread)))

    def read(name: str) -> torch.Tensor:
        return source.read(prefix + name, dtype).clone()

    def norm(name: str) -> Norm:
        return Norm(read(f"{name}.weight"), read(f"{name}.bias"))

    def product(*names: str) -> M:
        weights = [source.read(f"{prefix}{name}.weight", dtype) for name in names]
        return matrix(torch.cat(weights), torch.cat([read(f"{name}.bias") for name in names]))

    def layer(index: int) -> EncoderLayer[M]:
        at = f"encoder.layer.{index}"
        attention = f"{at}.attention"
        return EncoderLayer(
            qkv=product(*(f"{attention}.self.{name}" for name in ("query", "key", "value"))),
            attention_output=product(f"{attention}.output.dense"),
            attention_norm=norm(f"{attention}.output.LayerNorm"),
            inner=product(f"{at}.intermediate.dense"),
            output=product(f"{at}.output.dense"),
            output_norm=norm(f"{at}.output.LayerNorm"),
        )

    return EncoderWeights(
        spec=spec,
        words=read("embeddings.word_embeddings.weight"),
        positions=read("embeddings.position_embeddings.weight"),
        token_types=read("embeddings.token_type_embeddings.weight"),
        norm=norm("embeddings.LayerNorm"),
        layers=[layer(index) for index in range(spec.num_layers)],
    )


def _shapes(spec: EncoderSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint must hold."""
    hidden, inner = spec.hidden_size, spec.inner_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (spec.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (spec.num_positions, hidden),
        "embeddings.token_type_embeddings.weight": (spec.num_token_types, hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for index in range(spec.num_layers):
        at = f"encoder.layer.{index}"
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
        matrices = {f"{at}.attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")}
        matrices |= {
            f"{at}.attention.output.dense": (hidden, hidden),
            f"{at}.intermediate.dense": (inner, hidden),
            f"{at}.output.dense": (hidden, inner),
        }
        for name, (rows, columns) in matrices.items():
            shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], 1) if len(shape) == 1 else (shape[0], shape[1])
