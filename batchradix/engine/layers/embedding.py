"""The token embedding: a row of the table for every token id."""

from __future__ import annotations

import torch


class Embedding:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight  # [V, D]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64[T] to [T, D]."""
        return self.weight.index_select(0, token_ids)
