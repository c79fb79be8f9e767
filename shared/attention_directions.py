"""Which way a model's tokens look. The shell plans steps by it, the core computes by it."""

from collections.abc import Mapping
from typing import Any


def attends_both_ways(hf_config: Mapping[str, Any]) -> bool:
    """Whether each token sees those behind it, too: such a model embeds, and cannot generate."""
    return hf_config.get("is_causal") is False or hf_config.get("use_bidirectional_attention") is True
