"""The experts of a mixture: each token's own feed-forward layers, weighted and summed.

Shapes: T tokens, N experts, k experts a token, D hidden, F width of an expert.
"""

from __future__ import annotations

import torch

from batchradix_kernels.moe_gemm.reference import moe_experts_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["moe_experts", "moe_experts_reference"]


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Sums of what each token's experts make of it (SwiGLU), times their weights: [T, D].

    ``x``: [T, D], a view whose last axis is dense; ``gate_up``: [N, 2F, D], gates first; ``down``:
    [N, D, F], contiguous and of the dtype of ``x``: float32, float16 or bfloat16. ``expert_ids``:
    int32 or int64[T, k], each below N, ``weights``: float32[T, k], contiguous. Products are summed
    in float32; what is gated and each expert's weighted result are rounded to the dtype of ``x``,
    the sum of a token's k results once more.
    """
    if serves(x.device):
        from batchradix_kernels.moe_gemm.triton import moe_experts_triton

        return moe_experts_triton(x, gate_up, down, expert_ids, weights)
    return moe_experts_reference(x, gate_up, down, expert_ids, weights)
