"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch.nn import functional


class RMSNorm:
    """Normalises the last dimension in float32 and multiplies by ``weight`` in its dtype."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight
        self.epsilon = epsilon
        self._shape = tuple(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self._shape, self.weight, self.epsilon)
