"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch

from batchradix_kernels.rms_norm import rms_norm


class RMSNorm:
    """Normalises the last dimension in float32 and multiplies by ``weight``."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight
        self.epsilon = epsilon

    def __call__(self, x_TD: torch.Tensor, left: torch.Tensor | None = None) -> torch.Tensor:
        """[T, D] to [T, D]; ``left`` is added to ``x_TD``, in place, before."""
        return rms_norm(x_TD, self.weight, self.epsilon, left)
