"""Merging partial attention by log-sum-exp, written to be obviously right."""

from __future__ import annotations

import torch


def lse_merge_reference(
    outputs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `lse_merge`, computed in float64."""
    weights = torch.exp(lses.double())
    total = weights.sum(dim=0)
    terms = torch.where(weights[..., None] > 0, weights[..., None] * outputs.double(), 0.0)
    merged = terms.sum(dim=0) / torch.where(total > 0, total, 1.0)[..., None]
    return merged.float(), torch.log(total).float()
