"""Rotary position embedding: frequencies from a model's config, tables of cosines and sines for a step's positions."""

from __future__ import annotations

import math

from ...shared.rope_config import RopeConfig
from ..lazy_torch import torch
from .spec import RotarySpec


def inverse_frequencies(rotary: RotarySpec) -> torch.Tensor:
    """[dim / 2] float32: radians that each pair of channels turns per position."""
    rope = rotary.rope
    exponents = torch.arange(0, rotary.dim, 2, dtype=torch.int64).float() / rotary.dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_low_frequencies(frequencies, rope)
    return frequencies


def _stretch_low_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3's scaling: long waves are slowed by `factor`, short ones kept, those in between blended."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def rotary_tables(
    frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [num_tokens, 1, dim] of `dtype`; sin carries the sign that each half needs.

    positions: [num_tokens] int64. With x' = x with its halves swapped, a head turns to x * cos + x' * sin.
    """
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotary_table(frequencies: torch.Tensor, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_positions, dim] float32: cosines, then sines, each rounded to `dtype` as `rotary_tables` gives them."""
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype).float()
