"""Rotary position embedding (RoFormer, Su et al. 2021), pairs half the head apart."""

from __future__ import annotations

import math

import torch

from batchradix.checkpoint.model_config import RopeConfig


class Rotary:
    """Angles of a model's positions, and the rotation by them, both in float32."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._half = head_dim // 2

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64[T] to what `rotate` takes: cosines and signed sines, float32[T, 1, E] each."""
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    def rotate(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, heads, E] of any dtype to float32[T, heads, E]."""
        cos, signed_sin = angles
        return (x * cos).addcmul_(x.roll(self._half, -1), signed_sin)


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
