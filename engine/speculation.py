"""`speculative_config`, as callers write it, made into a checked `SpeculativeConfig`. Called by `EngineArgs`."""

from collections.abc import Mapping
from typing import Any

from ..protocol.config import SpeculativeConfig
from ..protocol.param_checks import int_at_least, reject

_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
_DEFAULT_TOKENS = 3  # with the token they follow, four rows: as many as cost little more than one
_DEFAULT_LOOKUP = (3, 5)
MAX_SPECULATIVE_TOKENS = 15


def parse_speculative_config(given: Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """None where nothing is to be drafted. Raises VLLMValidationError naming the entry at fault.

    Of `prompt_lookup_min` and `prompt_lookup_max` one alone stands for both.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        reject("speculative_config", given, "None or a dict")
    if unknown := sorted(given.keys() - set(_KEYS)):
        reject("speculative_config", unknown, f"a dict with entries among {', '.join(_KEYS)}")
    if given.get("method", "ngram") != "ngram":
        reject("speculative_config.method", given["method"], "'ngram': drafts come from the text so far")
    figures = {key: given.get(key) for key in _KEYS[1:]}
    for key, value in figures.items():
        if value is not None:
            int_at_least(f"speculative_config.{key}", value, 1)
    count = figures["num_speculative_tokens"] or _DEFAULT_TOKENS
    if count > MAX_SPECULATIVE_TOKENS:
        legal = f"at most {MAX_SPECULATIVE_TOKENS}"
        reject("speculative_config.num_speculative_tokens", count, legal)
    shortest, longest = figures["prompt_lookup_min"], figures["prompt_lookup_max"]
    if shortest is None and longest is None:
        shortest, longest = _DEFAULT_LOOKUP
    shortest, longest = shortest or longest, longest or shortest
    assert shortest is not None and longest is not None
    if shortest > longest:
        reject("speculative_config.prompt_lookup_min", shortest, f"at most prompt_lookup_max ({longest})")
    return SpeculativeConfig(num_speculative_tokens=count, prompt_lookup_min=shortest, prompt_lookup_max=longest)
