"""Pictures in the worker: the tower, the embeddings that it gave, and where they stand in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ...protocol.multimodal import EMBEDS, PIXELS, MultiModalFeatureSpec
from ..dtypes import DType
from ..lazy_torch import torch
from ..models.tensor_source import ALL_ROWS, TensorSource
from ..models.vision import VisionSpec
from .tower import VisionTower, num_bytes

T = TypeVar("T")


class Encoder:
    """What the scheduler has had encoded, by identifier, until it says that it is not needed any more."""

    def __init__(self, spec: VisionSpec, dtype: DType) -> None:
        self.spec = spec
        self.dtype = dtype
        self._tower: VisionTower | None = None
        self._outputs: dict[str, torch.Tensor] = {}  # [num_embeds, output_size]

    @property
    def num_bytes(self) -> int:
        """What the tower takes."""
        return num_bytes(self.spec, self.dtype.torch)

    def load(self, source: TensorSource) -> None:
        """Raises ValueError as `VisionTower` does."""
        self._tower = VisionTower(self.spec, self.dtype.torch, source)

    def unload(self) -> None:
        self._tower = None

    def forget(self) -> None:
        self._outputs.clear()

    def update(self, dropped: Iterable[str], wanted: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Drop these outputs; then encode the items of `wanted`, of which `check_data` has approved."""
        for identifier in dropped:
            self._outputs.pop(identifier, None)
        for identifier, data in wanted.items():
            if EMBEDS in data:
                self._outputs[identifier] = torch.from_numpy(np.array(data[EMBEDS])).to(self.dtype.torch)
            else:
                assert self._tower is not None, "the model is asleep"
                self._outputs[identifier] = self._tower.embed(torch.from_numpy(np.array(data[PIXELS])))

    def pieces(
        self, features: Sequence[MultiModalFeatureSpec], first: int, count: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The embeddings among the prompt's tokens first..first + count, as runs: how many tokens behind `first` a run
        begins, and its rows."""
        for feature in features:
            position = feature.mm_position
            if position.end <= first or position.offset >= first + count:
                continue
            places = position.embed_positions()
            begin, end = np.searchsorted(places, (first, first + count)).tolist()
            output = self._outputs[feature.identifier]
            cuts = np.flatnonzero(np.diff(places[begin:end]) > 1) + 1
            for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), end - begin], strict=True):
                if start < stop:
                    yield int(places[begin + start]) - first, output[begin + start : begin + stop]


def check_data(feature: MultiModalFeatureSpec, spec: VisionSpec) -> None:
    """Raises ValueError where an item's arrays are not what its tokens stand for."""
    data, count = feature.data or {}, feature.mm_position.num_embeds
    if set(data) not in ({EMBEDS}, {PIXELS}):
        raise ValueError(f"mm_features: data holds {sorted(data)}; it must be {PIXELS} or {EMBEDS}")
    ((name, array),) = data.items()
    size = spec.image_size
    shape: tuple[int, ...] = (count, spec.output_size)
    if name == PIXELS:
        num_tiles, rest = divmod(count, spec.embeds_per_tile)
        if rest:
            raise ValueError(f"mm_features: {count} tokens of a picture; each tile has {spec.embeds_per_tile}")
        shape = (num_tiles, 3, size, size)
    if array.dtype != np.float32 or array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"mm_features: {name} must be {list(shape)} of finite float32, got {list(array.shape)}")


class PartOfSource(TensorSource):
    """Some of a checkpoint's tensors, by how their names begin, and what is to stand there instead."""

    def __init__(self, source: TensorSource, prefixes: Sequence[tuple[str, str]], others: bool = False) -> None:
        """others: all the tensors that begin otherwise, under their own names, in place of these."""
        self.path = source.path
        self._source = source
        self._names: dict[str, str] = {}
        for name in (*source.shapes, *source.unreadable):
            prefix = next(((old, new) for old, new in prefixes if name.startswith(old)), None)
            if others and prefix is None:
                self._names[name] = name
            elif not others and prefix is not None:
                self._names[prefix[1] + name.removeprefix(prefix[0])] = name

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._renamed(self._source.shapes)

    @property
    def unreadable(self) -> Mapping[str, str]:
        return self._renamed(self._source.unreadable)

    def _renamed(self, found: Mapping[str, T]) -> dict[str, T]:
        return {name: found[stored] for name, stored in self._names.items() if stored in found}

    @property
    def files(self) -> Sequence[str]:
        return self._source.files

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return self._source.read(self._names[name], dtype, rows)

    def close(self) -> None:
        """The whole checkpoint is closed by whoever opened it."""
