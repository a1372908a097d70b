"""Angles of the rotary position embedding (RoFormer, Su et al. 2021)."""

from __future__ import annotations

import math

import torch

from batchradix.checkpoint.model_config import RopeConfig


class Rotary:
    """The angles of a model's positions."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._amplitude = rope.amplitude

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64[T] to cosines and sines, float32[T, E / 2] each, scaled: what `rope` takes."""
        angles = positions.float()[:, None] * self._frequencies
        cosines, sines = angles.cos(), angles.sin()
        if self._amplitude != 1.0:
            cosines, sines = cosines * self._amplitude, sines * self._amplitude
        return cosines, sines


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32[E / 2] radians a position, after scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    wavelengths = rope.theta**exponents
    frequencies = 1.0 / wavelengths
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(wavelengths, rope, head_dim)
    return frequencies


def _yarn(wavelengths: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Fast rotations kept, slow ones divided by the factor, those between blended by dimension.
    ``wavelengths``: positions a radian."""

    def dimension(rotations: float) -> float:
        """Where a pair rotates so many times within the original context."""
        wavelength = rope.original_context_length / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(rope.fast_rotations), dimension(rope.slow_rotations)
    if rope.whole_dimensions:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # a blend of no width is a step
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


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
