"""Which adapters are in memory. Owned by the worker; the core calls it by the worker's methods."""

import logging
from typing import Any

from ...protocol.config import LoRAConfig
from ...protocol.lora import NO_ADAPTERS, LoadedAdapter, LoRARequest
from ..lazy_torch import inference_mode, torch
from ..runtime.interface import Runtime
from .adapter import Adapter

logger = logging.getLogger("corespan.core")


class AdapterCache:
    """At most `max_cpu_loras` adapters by their numbers, the least recently used first; pinned ones stay.

    Requests that run hold their adapter themselves: whatever is dropped here, they go on with the weights that they
    began with.
    """

    def __init__(self, config: LoRAConfig | None, runtime: Runtime[Any]) -> None:
        self._config = config
        self._capacity = 0 if config is None else config.max_cpu_loras
        self._runtime = runtime
        self._adapters: dict[int, tuple[LoRARequest, Adapter]] = {}
        self._pinned: set[int] = set()

    def add(self, request: LoRARequest) -> str:
        """Sees to it that the adapter is in memory; its digest. Raises ValueError, and then nothing has changed."""
        known = self._adapters.get(request.lora_int_id)
        if known is None or request.load_inplace:
            return self._load(request).digest
        named, adapter = known
        if (named.lora_name, named.lora_path) != (request.lora_name, request.lora_path):
            raise ValueError(
                f"lora_int_id {request.lora_int_id} of adapter {request.lora_name!r} is that of {named.lora_name!r} "
                f"({named.lora_path}): give each adapter a number of its own, or set load_inplace=True"
            )
        self._touch(request.lora_int_id)
        return adapter.digest

    def get(self, loaded: LoadedAdapter) -> Adapter:
        """The adapter with just these weights, read again where it has been dropped. Raises ValueError."""
        request, digest = loaded.request, loaded.digest
        known = self._adapters.get(request.lora_int_id)
        if known is not None and known[1].digest == digest:
            self._touch(request.lora_int_id)
            return known[1]
        adapter = self._load(request, digest, keep=known is None)
        return adapter

    def remove(self, lora_int_id: int) -> bool:
        self._pinned.discard(lora_int_id)
        return self._adapters.pop(lora_int_id, None) is not None

    def pin(self, lora_int_id: int) -> bool:
        """Raises ValueError for an adapter that is not in memory."""
        if lora_int_id not in self._adapters:
            raise ValueError(f"pinning failed: no adapter with lora_int_id {lora_int_id} is in memory; add_lora() it")
        self._pinned.add(lora_int_id)
        return True

    def list(self) -> list[int]:
        return sorted(self._adapters)

    def _load(self, request: LoRARequest, digest: str | None = None, keep: bool = True) -> Adapter:
        """digest: of the weights that it must have."""
        name = f"adapter {request.lora_name!r}"
        if keep and request.lora_int_id not in self._adapters and len(self._pinned) >= self._capacity:
            raise ValueError(f"{name} has no room: all of max_cpu_loras={self._capacity} adapters are pinned")
        try:
            adapter = self._read(request.lora_path)
        except (ValueError, MemoryError) as error:
            raise ValueError(f"{name} cannot be loaded: {error}") from error
        if digest not in (None, adapter.digest):
            raise ValueError(f"the files of {name} in {request.lora_path} have changed since it was added")
        if keep:
            self._make_room(request.lora_int_id)
            self._adapters[request.lora_int_id] = request, adapter
        return adapter

    @inference_mode
    def _read(self, path: str) -> Adapter:
        config = self._config
        if config is None:
            raise ValueError(NO_ADAPTERS)
        from .files import read_adapter  # loads torch

        adapter = read_adapter(path, self._runtime.spec, getattr(torch, config.lora_dtype), config.max_lora_rank)
        return self._runtime.keep_adapter(adapter)

    def _make_room(self, newcomer: int) -> None:
        """A newcomer has been read: one that fails costs nobody its place."""
        self._adapters.pop(newcomer, None)
        if len(self._adapters) >= self._capacity:
            oldest = next(each for each in self._adapters if each not in self._pinned)
            logger.info("Adapter %r makes room for another", self._adapters[oldest][0].lora_name)
            del self._adapters[oldest]

    def _touch(self, lora_int_id: int) -> None:
        self._adapters[lora_int_id] = self._adapters.pop(lora_int_id)
