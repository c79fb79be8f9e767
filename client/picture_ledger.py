"""Which pictures the core has, as far as its client can know: what it has need not be sent again. A connection to a
core has one; another core has another, and so gets everything."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from ..protocol.outputs import EngineCoreOutput
from ..protocol.requests import EngineCoreRequest


class PictureLedger:
    """The last pictures that were sent, of `capacity` bytes at most. The core keeps as much, but may have dropped some
    all the same: then it asks for the request again, whole. Safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sizes: OrderedDict[str, int] = OrderedDict()  # bytes, by identifier
        self._num_bytes = 0
        self._trimmed: dict[str, EngineCoreRequest] = {}  # by request id, whole, until the core has answered
        self._lock = threading.Lock()

    def trim(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request as it is to be sent: without the pictures that the core has."""
        with self._lock:
            known = [feature.identifier in self._sizes for feature in request.mm_features]
            for feature in request.mm_features:
                self._enter(feature.identifier, sum(array.nbytes for array in (feature.data or {}).values()))
        if not any(known):
            return request
        with self._lock:
            self._trimmed[request.request_id] = request
        features = [
            msgspec.structs.replace(feature, data=None) if is_known else feature
            for feature, is_known in zip(request.mm_features, known, strict=True)
        ]
        return msgspec.structs.replace(request, mm_features=features)

    def discard(self, request_ids: Iterable[str]) -> None:
        """They have been aborted."""
        with self._lock:
            for request_id in request_ids:
                self._trimmed.pop(request_id, None)

    def answered(self, output: EngineCoreOutput) -> EngineCoreRequest | None:
        """The core has said something of a request: the request, whole, if that was to be sent again."""
        with self._lock:
            request = self._trimmed.pop(output.request_id, None)
            return request if output.resend else None

    def _enter(self, identifier: str, size: int) -> None:
        if identifier in self._sizes:
            self._sizes.move_to_end(identifier)
        elif size <= self._capacity:
            self._sizes[identifier] = size
            self._num_bytes += size
        while self._num_bytes > self._capacity:
            self._num_bytes -= self._sizes.popitem(last=False)[1]
