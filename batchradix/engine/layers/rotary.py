"""Angles of the rotary position embedding (RoFormer, Su et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from batchradix.checkpoint.model_config import RopeConfig

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32[T, E / 2] each, scaled: what `rope` takes."""


class Rotary:
    """The angles of positions, where ``head_dim`` elements of a head are in pairs.

    Where only some of them are rotated, their pairs come first; the angles of the others are 0.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        rotated = rope.rotated_dim or head_dim
        self._rope = rope
        self._head_dim = head_dim
        self._rotated_dim = rotated
        self._frequencies = inverse_frequencies(rope, rotated).to(device)

    def angles(self, positions: torch.Tensor) -> Angles:
        """int64[T] to `Angles`."""
        frequencies = self._frequencies
        if self._rope.kind == "dynamic":
            frequencies = _dynamic(self._rope, frequencies, positions)
        angles = positions.float()[:, None] * frequencies
        cosines, sines = angles.cos(), angles.sin()
        if self._rope.amplitude != 1.0:
            cosines, sines = cosines * self._rope.amplitude, sines * self._rope.amplitude
        left = (self._head_dim - self._rotated_dim) // 2
        if left:
            cosines = torch.cat((cosines, cosines.new_ones(len(cosines), left)), dim=1)
            sines = torch.cat((sines, sines.new_zeros(len(sines), left)), dim=1)
        return cosines, sines


class LayerRotary:
    """The angles of every layer of a model, computed once where layers have them in common."""

    def __init__(
        self, ropes: Sequence[RopeConfig | None], head_dim: int, device: torch.device
    ) -> None:
        self._ropes = tuple(ropes)
        self._rotaries = {
            rope: Rotary(rope, head_dim, device) for rope in ropes if rope is not None
        }

    def angles(self, positions: torch.Tensor) -> list[Angles | None]:
        """int64[T] to `Angles` of each layer; None where nothing is rotated."""
        found = {rope: rotary.angles(positions) for rope, rotary in self._rotaries.items()}
        return [None if rope is None else found[rope] for rope in self._ropes]


def inverse_frequencies(rope: RopeConfig, rotated_dim: int) -> torch.Tensor:
    """float32[rotated_dim / 2] radians a position, after scaling."""
    exponents = torch.arange(0, rotated_dim, 2, dtype=torch.int64).float() / rotated_dim
    wavelengths = rope.theta**exponents
    frequencies = 1.0 / wavelengths
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(wavelengths, rope, rotated_dim)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors) * wavelengths)
    return frequencies


def _dynamic(rope: RopeConfig, frequencies: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float32[T, E / 2]: of each position, as in a context that ends with it, which is how
    `transformers` rotates a token that it generates. So a key does not depend on what follows it.
    """
    rotated_dim = 2 * len(frequencies)
    exponents = torch.arange(0, rotated_dim, 2, device=positions.device).float() / rotated_dim
    original = rope.original_context_length
    lengths = (positions + 1).float()[:, None]
    growth = rope.factor * lengths / original - (rope.factor - 1)
    theta = rope.theta * growth.clamp_min(1) ** (rotated_dim / (rotated_dim - 2))
    return torch.where(lengths > original, 1.0 / theta**exponents, frequencies)


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
