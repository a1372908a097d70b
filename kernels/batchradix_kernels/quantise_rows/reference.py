"""Rows as int8 times a scale, rotated before, in plain torch."""

from __future__ import annotations

import torch

SMALLEST_PEAK = 1e-30  # rows that stay below are zero


def random_signs(width: int) -> torch.Tensor:
    """float32[width]: 1 or -1, the same for every call."""
    hashed = torch.arange(width) * 0x9E3779B1 & 0xFFFFFFFF
    hashed = (hashed ^ hashed >> 15) * 0x85EBCA77 & 0xFFFFFFFF
    return 1.0 - 2.0 * (hashed >> 31)


def rotate_rows_reference(x: torch.Tensor) -> torch.Tensor:
    """Rows [T, D], floating, times one orthogonal matrix that spreads large elements.

    Random signs, a Hadamard matrix of the largest power of two that divides D, over elements
    D / power apart, and a reflection that mixes the runs of that length which it leaves.
    """
    width = x.shape[1]
    power = width & -width
    x = x * random_signs(width).to(x)
    for _ in range(power.bit_length() - 1):
        left, right = x.chunk(2, dim=1)
        x = torch.stack((left + right, left - right), dim=2).flatten(1)
    runs = x.view(len(x), -1, power)
    if width > power:
        runs = runs - 2 * power / width * runs.sum(dim=1, keepdim=True)
    rotated: torch.Tensor = runs.reshape(x.shape) * (1 / power**0.5)
    return rotated


def quantise_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `quantise_rows`, on any device."""
    x = rotate_rows_reference(x.float())
    peaks = x.abs().amax(dim=-1)
    # A number over a tensor would be the number times its reciprocal.
    factors = torch.where(peaks >= SMALLEST_PEAK, torch.full_like(peaks, 127.0) / peaks, 0.0)
    finite = peaks.isfinite()
    values = torch.where(finite[:, None], x * factors[:, None], 0.0).round().to(torch.int8)
    scales = torch.where(peaks >= SMALLEST_PEAK, peaks / 127.0, 0.0)
    return values, torch.where(finite, scales, torch.nan)
