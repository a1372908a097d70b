"""Angles of the rotary position embedding (RoFormer, Su et al. 2021)."""

from __future__ import annotations

import math

import torch

from batchradix.checkpoint.model_config import RopeConfig


class Rotary:
    """The angles of a model's positions."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64[T] to cosines and sines, float32[T, E / 2] each: what `rope` takes."""
        angles = positions.float()[:, None] * self._frequencies
        return angles.cos(), angles.sin()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32[E / 2] radians a position, after scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Low frequencies divided by the factor, high ones kept, those between blended."""
    length = rope.original_context_length
    wavelengths = 2 * math.pi / frequencies
    blend = (length / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    low = wavelengths > length / rope.low_freq_factor
    high = wavelengths < length / rope.high_freq_factor
    scaled = torch.where(low, frequencies / rope.factor, frequencies)
    return torch.where(~low & ~high, blended, scaled)
