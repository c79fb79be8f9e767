"""The pictures that clients have sent: they leave out of later requests what they believe to be here. Used by the input
thread, and emptied from the busy loop."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from ...protocol.multimodal import MultiModalFeatureSpec


class MissingPicturesError(ValueError):
    """A request leaves out pictures that are not here; its client is to send it again, whole."""


class PictureCache:
    """At most `capacity` bytes, the least recently used first to go."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pictures: OrderedDict[str, dict[str, np.ndarray]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def completed(self, features: Sequence[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
        """With what each leaves out. Raises MissingPicturesError."""
        with self._lock:
            return [self._completed(feature) for feature in features]

    def keep(self, features: Sequence[MultiModalFeatureSpec]) -> None:
        with self._lock:
            for feature in features:
                size = _num_bytes(feature.data or {})
                if feature.identifier not in self._pictures and size <= self._capacity:
                    self._pictures[feature.identifier] = feature.data or {}
                    self._num_bytes += size
            while self._num_bytes > self._capacity:
                self._num_bytes -= _num_bytes(self._pictures.popitem(last=False)[1])

    def reset(self) -> None:
        with self._lock:
            self._pictures.clear()
            self._num_bytes = 0

    def _completed(self, feature: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
        if feature.identifier in self._pictures:
            self._pictures.move_to_end(feature.identifier)
        if feature.data is not None:
            return feature
        if feature.identifier not in self._pictures:
            raise MissingPicturesError(f"the picture {feature.identifier} is not here")
        return msgspec.structs.replace(feature, data=self._pictures[feature.identifier])


def _num_bytes(data: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in data.values())
