"""Which LoRA adapters the core has read for this engine. Both engines have such a book."""

import os
from collections.abc import Sequence

import msgspec

from ...protocol.config import LoRAConfig
from ...protocol.lora import NO_ADAPTERS, LoadedAdapter, LoRARequest
from ...protocol.param_checks import reject, reject_type

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or for each its own or none."""


class AdapterBook:
    """An adapter enters once the core has read it, so that its next requests need not ask. It stays when the core has
    dropped it for others: the core reads the files again, and sees to it that the weights are the same."""

    def __init__(self, config: LoRAConfig | None) -> None:
        self._enabled = config is not None
        self._adapters: dict[int, LoadedAdapter] = {}

    def require_enabled(self, lora_request: object) -> None:
        """Raises VLLMValidationError where there are no adapters, for anything but None or a sequence of it."""
        requests = lora_request if isinstance(lora_request, (list, tuple)) else [lora_request]
        if not self._enabled and any(request is not None for request in requests):
            reject("lora_request", lora_request, f"None: {NO_ADAPTERS}")

    def resolved(self, lora_request: object) -> LoRARequest:
        """With an absolute path, as the core wants it. Raises TypeError and VLLMValidationError."""
        self.require_enabled(lora_request)
        if not isinstance(lora_request, LoRARequest):
            reject_type("lora_request", lora_request, "a LoRARequest or None")
        path = os.path.abspath(os.path.expanduser(lora_request.lora_path))
        return msgspec.structs.replace(lora_request, lora_path=path)

    def find(self, request: LoRARequest) -> LoadedAdapter | None:
        """request: resolved. None where the core is to be asked."""
        known = self._adapters.get(request.lora_int_id)
        if known is None or request.load_inplace or known.request.lora_path != request.lora_path:
            return None
        return known if known.request == request else None

    def enter(self, request: LoRARequest, digest: str) -> LoadedAdapter:
        kept = msgspec.structs.replace(request, load_inplace=False)
        self._adapters[request.lora_int_id] = loaded = LoadedAdapter(kept, digest)
        return loaded

    def forget(self, lora_int_id: int) -> None:
        self._adapters.pop(lora_int_id, None)
