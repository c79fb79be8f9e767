"""Logits processors that raise what a request's extra_args ask for: {"method": ..., "error": ...}."""

from typing import Any

from odd_errors import raise_odd

from corespan import SamplingParams
from corespan.core.sampling.logits_processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor


class FailingProcessor(LogitsProcessor):
    """Raises from any of its methods, while a request that asks for that is in the batch."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.failing: dict[int, dict[str, str]] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        wanted = params.extra_args or {}
        if wanted.get("method") == "validate_params":
            raise_odd(wanted["error"])

    def is_argmax_invariant(self) -> bool:
        self._fail("is_argmax_invariant")
        return False

    def is_active(self) -> bool:
        self._fail("is_active")
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for row in batch_update.removed if batch_update is not None else ():
            self.failing.pop(row, None)
        for request in batch_update.added if batch_update is not None else ():
            self.failing.pop(request.row, None)
            if request.params.extra_args:
                self.failing[request.row] = request.params.extra_args
        self._fail("update_state")

    def apply(self, logits: Any) -> Any:
        self._fail("apply")
        if any(wanted["method"] == "result" for wanted in self.failing.values()):
            return logits[:, 1:]
        return logits

    def _fail(self, method: str) -> None:
        for wanted in self.failing.values():
            if wanted["method"] == method:
                raise_odd(wanted["error"])


class FailingAdapter(AdapterLogitsProcessor):
    """Raises for the requests that ask for it, when they come or when a token is drawn."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        wanted = params.extra_args
        if not wanted:
            return None
        if wanted["method"] == "new_req_logits_processor":
            raise_odd(wanted["error"])
        return lambda output, logits: raise_odd(wanted["error"]) if len(output) == 2 else logits
