"""What a request is sampled with when the caller gives no parameters: the model's own generation config."""

from ...protocol.config import ModelConfig
from ...protocol.params import SamplingParams

_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's name -> SamplingParams' name, for the entries that count."""


def default_sampling_params(model_config: ModelConfig) -> SamplingParams:
    """`SamplingParams()` with the model's defaults in place of its own. Raises ValueError for values out of range."""
    config = model_config.generation_config
    given = {field: config[name] for name, field in _FIELDS.items() if config.get(name) is not None}
    return SamplingParams(**given)
