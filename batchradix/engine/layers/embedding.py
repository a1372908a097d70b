"""The token embedding: a row of the table for every token id."""

from __future__ import annotations

import torch


class Embedding:
    """``scale`` is rounded to the dtype of the table before rows are multiplied by it."""

    def __init__(self, weight: torch.Tensor, scale: float = 1.0) -> None:
        self.weight = weight  # [V, D]
        self.scale = float(torch.tensor(scale, dtype=weight.dtype))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64[T] to [T, D]."""
        rows = self.weight.index_select(0, token_ids)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)
