"""A linear layer of int8 weights and int8 rows in plain torch."""

from __future__ import annotations

import torch


def int8_linear_reference(
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32[T, N] from int8[T, K], float32[T], int8[N, K], float32[N] and [N]; sums of
    products are exact."""
    out = torch._int_mm(values, weight.T).float() * scales[:, None] * weight_scales
    return out if bias is None else out + bias
