"""`LoRARequest`: which adapter a request is answered with. Given by callers, and carried to the core."""

from typing import Any

import msgspec

from .param_checks import int_at_least, is_encodable, reject

NO_ADAPTERS = "the engine takes no LoRA adapters; build it with enable_lora=True"


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True, eq=False):
    """An adapter by its name, number and place. Two of the same name are equal.

    `lora_path`: a folder with PEFT's adapter_config.json and weights, or a GGUF file of llama.cpp's. `load_inplace`:
    read it again, even if an adapter with this number is in memory. Raises VLLMValidationError.
    """

    lora_name: str
    lora_int_id: int  # from 1; another one for each adapter
    lora_path: str = ""
    base_model_name: str | None = None  # for the caller's own information
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or not is_encodable(value) or "\0" in value:
                reject(name, value, "a str that is not empty")
        self.lora_int_id = int_at_least("lora_int_id", self.lora_int_id, 1)

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


class LoadedAdapter(msgspec.Struct, array_like=True, frozen=True):
    """An adapter whose weights the core has read, and their digest: a request gets these weights or an error."""

    request: LoRARequest
    digest: str
