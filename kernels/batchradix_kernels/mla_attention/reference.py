"""Attention with keys in two parts, one query at a time, written to be obviously right."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from batchradix_kernels.tree_attention.reference import slots_of_query


def mla_attention_reference(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    keys: torch.Tensor,
    ropes: torch.Tensor,
    values: torch.Tensor | None,
    context: Iterable[tuple[int, ...]],
    causal: Iterable[tuple[int, ...]],
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `mla_attention`, computed in float64; returns float32."""
    context, causal = list(context), list(causal)
    num_queries, num_heads, _ = q.shape
    keys_HSA = keys.double().expand(num_heads, -1, -1)
    values_HSV = keys_HSA if values is None else values.double()
    out = torch.zeros((num_queries, num_heads, values_HSV.shape[2]), device=q.device)
    lse = torch.full((num_queries, num_heads), -math.inf, device=q.device)
    for t in range(num_queries):
        slots = slots_of_query(t, context, causal)
        if not slots:
            continue
        scores = torch.einsum("ha,hsa->hs", q[t].double(), keys_HSA[:, slots])
        scores += torch.einsum("hr,sr->hs", q_rope[t].double(), ropes[slots].double())
        weights = torch.softmax(scale * scores, dim=1)
        out[t] = torch.einsum("hs,hsv->hv", weights, values_HSV[:, slots])
        lse[t] = (scale * scores).logsumexp(dim=1)
    return out, lse
