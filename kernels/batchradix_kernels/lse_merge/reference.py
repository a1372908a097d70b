"""Merging partial attention by log-sum-exp, written to be obviously right."""

from __future__ import annotations

from itertools import pairwise

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


def merge_parts_reference(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    offsets: torch.Tensor,
    parts: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Same contract as `merge_parts`, a query at a time."""
    for query, (first, end) in enumerate(pairwise(offsets.tolist())):
        chosen = parts[first:end].long()
        merged, lse = lse_merge_reference(outputs[chosen], lses[chosen])
        if sinks is not None:
            merged *= torch.sigmoid(lse - sinks)[:, None]
        out[query] = merged.to(out.dtype)
        if out_lse is not None:
            out_lse[query] = lse
