"""A linear layer of bfloat16 weights in plain torch, with SwiGLU behind it where it is gated."""

from __future__ import annotations

import torch
from torch.nn import functional


def bf16_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
) -> torch.Tensor:
    """float32[T, N] from bfloat16[T, K], [N, K] and [N]; all arithmetic is float32.

    ``gated``: the upper half of the weight are gates of the lower half, and the result is
    float32[T, N / 2].
    """
    out = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if not gated:
        return out
    gates, ups = out.chunk(2, dim=1)
    return functional.silu(gates) * ups
