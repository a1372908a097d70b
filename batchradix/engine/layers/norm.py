"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch

from batchradix.engine.layers.linear import Rows
from batchradix_kernels.rms_norm import rms_norm, rms_norm_int8


class RMSNorm:
    """Normalises the last dimension in float32 and multiplies by ``weight``."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight
        self.epsilon = epsilon

    def __call__(self, x_TD: torch.Tensor, left: torch.Tensor | None = None) -> torch.Tensor:
        """[T, D] to [T, D]; ``left`` is added to ``x_TD``, in place, before."""
        return rms_norm(x_TD, self.weight, self.epsilon, left)

    def before(self, is_quantised: bool, x_TD: torch.Tensor, left: torch.Tensor | None) -> Rows:
        """The same for a linear layer that may want its rows in 8 bits."""
        if is_quantised:
            return rms_norm_int8(x_TD, self.weight, self.epsilon, left)
        return rms_norm(x_TD, self.weight, self.epsilon, left)
