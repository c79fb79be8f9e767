"""An adapter's weights, as data: what is added to which products of a model. Files become it, and runtimes apply it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..lazy_torch import torch
from ..models.spec import ModelSpec
from ..models.tensor_names import layer_projections

PARTS_A_LAYER = 7
"""The matrices of a layer that adapters change: those of `layer_projections`, in that order."""

QKV, ATTENTION_OUT, GATE_UP, DOWN = 0, 3, 4, 6  # where each projection's matrices begin among them


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one matrix's product: x @ a.T @ b.T. a: [rank, columns]; b: [rows, rank], scaled."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.b.shape[1]  # also as a runtime packs it


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """`parts`: by place, which is the layer's index times PARTS_A_LAYER and the matrix's number in its layer; what is
    not there is left as it is. `digest` says which weights these are."""

    parts: Mapping[int, LowRank]
    digest: str


AdapterRows = tuple[Adapter, "torch.Tensor"]
"""An adapter and the tokens of a step that it changes: [n] int64, ascending."""


def matrix_places(spec: ModelSpec) -> dict[str, tuple[int, tuple[int, int]]]:
    """The place and shape [rows, columns] of every matrix that an adapter may change, by the
    matrix's name behind "layers."."""
    places = {}
    for index in range(len(spec.layers)):
        matrices = [
            (name, (rows, projection.columns))
            for projection in layer_projections(spec, index)
            for name, rows in zip(projection.names, projection.rows, strict=True)
        ]
        for number, (name, shape) in enumerate(matrices):
            places[name.removeprefix("model.layers.")] = index * PARTS_A_LAYER + number, shape
    return places


def digest_of(parts: Mapping[int, LowRank]) -> str:
    hasher = hashlib.sha256()
    for place in sorted(parts):
        for factor in (parts[place].a, parts[place].b):
            hasher.update(f"{place} {factor.dtype} {tuple(factor.shape)} ".encode())
            hasher.update(factor.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def delta(adapters: Sequence[AdapterRows], first_place: int, sizes: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """What adapters add to a product of x: [num_tokens, columns]. Returns [num_tokens, sum(sizes)] float32.

    sizes: rows of the product's matrices, which have the places from `first_place` on.
    """
    added = torch.zeros(len(x), sum(sizes))
    for adapter, rows in adapters:
        own, start = x[rows].float(), 0
        for place, size in enumerate(sizes, first_place):
            if (part := adapter.parts.get(place)) is not None:
                added[rows, start : start + size] = own @ part.a.float().T @ part.b.float().T
            start += size
    return added
