"""A layer of experts in plain torch: one after the other."""

from __future__ import annotations

import torch
from torch.nn import functional

from batchradix_kernels.swiglu.reference import swiglu_reference


def experts_reference(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gated_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Same contract as `Bf16Experts`, in any floating dtype; ``gate_up``: [N, 2F, D], ``down``:
    [N, D, F]. What is between the two products is rounded to ``gated_dtype``, that of ``x`` unless
    it is given."""
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in range(len(down)):
        token, place = (expert_ids == expert).nonzero(as_tuple=True)
        gated = swiglu_reference(functional.linear(x[token], gate_up[expert]))
        gated = gated.to(gated_dtype or x.dtype)
        one = functional.linear(gated.to(out.dtype), down[expert].to(out.dtype))
        out.index_add_(0, token, one * weights[token, place, None])
    return out.to(x.dtype)
