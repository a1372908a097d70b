"""Root mean square normalisation behind a residual, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Same contract as `rms_norm`, on any device and in any floating dtype."""
    if residual is not None:
        x.add_(residual)
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.float(), (x.shape[-1],), weight, epsilon).to(x.dtype)
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)
