"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import Protocol

import torch

from batchradix.engine.layers.linear import Rows
from batchradix_kernels.quantise_rows import quantise_rows
from batchradix_kernels.rms_norm import rms_norm, rms_norm_int8


class NormBefore(Protocol):
    """What stands before a linear layer."""

    def before(self, is_quantised: bool, x_TD: torch.Tensor, left: torch.Tensor | None) -> Rows:
        """What the layer takes, in 8 bits where ``is_quantised``; ``left`` is added to ``x_TD``,
        in place, before."""
        ...


class RMSNorm:
    """Normalises the last dimension in float32 and multiplies by ``weight``, which may be float32
    beside another dtype of the rows."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight
        self.epsilon = epsilon

    def __call__(self, x_TD: torch.Tensor, left: torch.Tensor | None = None) -> torch.Tensor:
        """[T, D] to [T, D]; ``left`` is added to ``x_TD``, in place, before."""
        return rms_norm(x_TD, self.weight, self.epsilon, left)

    def before(self, is_quantised: bool, x_TD: torch.Tensor, left: torch.Tensor | None) -> Rows:
        """As in `NormBefore`."""
        if is_quantised:
            return rms_norm_int8(x_TD, self.weight, self.epsilon, left)
        return rms_norm(x_TD, self.weight, self.epsilon, left)


class NoNorm:
    """Implements `NormBefore` where a family has none there."""

    def before(self, is_quantised: bool, x_TD: torch.Tensor, left: torch.Tensor | None) -> Rows:
        """As in `NormBefore`."""
        if left is not None:
            x_TD.add_(left)
        return quantise_rows(x_TD) if is_quantised else x_TD
