"""The experts of a mixture, one after the other, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def moe_experts_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Same contract as `moe_experts`, in any floating dtype."""
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in sorted(set(expert_ids.flatten().tolist())):
        tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        result = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, result.to(out.dtype) * weights[tokens, choices, None])
    return out.to(x.dtype)
