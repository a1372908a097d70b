"""Rows as int8 times a scale, in plain torch."""

from __future__ import annotations

import torch

SMALLEST_PEAK = 1e-30  # rows that stay below are zero


def quantise_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `quantise_rows`, on any device."""
    x = x.float()
    peaks = x.abs().amax(dim=-1)
    # A number over a tensor would be the number times its reciprocal.
    factors = torch.where(peaks >= SMALLEST_PEAK, torch.full_like(peaks, 127.0) / peaks, 0.0)
    finite = peaks.isfinite()
    values = torch.where(finite[:, None], x * factors[:, None], 0.0).round().to(torch.int8)
    scales = torch.where(peaks >= SMALLEST_PEAK, peaks / 127.0, 0.0)
    return values, torch.where(finite, scales, torch.nan)
