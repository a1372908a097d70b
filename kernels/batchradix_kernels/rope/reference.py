"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def rope_reference(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    num_q: int,
    num_k: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Same contract as `rope`, on any device and in any floating dtype."""
    qk = heads[:, : num_q + num_k]
    rotated = qk.float()
    if norms is not None:
        q_weight, k_weight, epsilon = norms
        weights = torch.cat((q_weight.expand(num_q, -1), k_weight.expand(num_k, -1)))
        rotated = functional.rms_norm(rotated, (heads.shape[-1],), None, epsilon) * weights.float()
    low, high = rotated.chunk(2, dim=-1)
    cos, sin = cosines[:, None], sines[:, None]
    qk.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
