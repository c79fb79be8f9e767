"""A user's logits processor whose module needs no torch: tensors come to it ready-made."""

from typing import Any

from corespan.core.sampling.logits_processors import BatchUpdate, LogitsProcessor
from corespan.protocol.params import SamplingParams


class Refusing(LogitsProcessor):
    """Changes nothing, and takes no request with extra_args={"refuse": True}."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if (params.extra_args or {}).get("refuse"):
            raise ValueError("extra_args['refuse'] is set")

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        return logits
