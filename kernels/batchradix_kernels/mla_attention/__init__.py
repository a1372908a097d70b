"""Multi-head latent attention over the pieces of a radix tree (DeepSeek-V2, 2024).

A token is kept as a latent and one rotated key for all heads. A key of a head is thus in two
parts, one without a position and the shared rope part. *Absorbed*, a query has gone through the
up-projection of the keys, the first part is the latent itself, and so is the value: all heads
read the same rows, once. *Expanded*, each head has its own first parts and values, made of the
latents before. The two differ in rounding alone; which is cheaper is a matter of how many queries
share the slots.

Shapes: T queries, H query heads, S slots, A the first part of a key, R its rope part, V a value.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from batchradix_kernels.mla_attention.reference import mla_attention_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["mla_attention", "mla_attention_reference"]


def mla_attention(
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
    """Attention of every query over the slots of its pieces.

    ``q``: [T, H, A], ``q_rope``: [T, H, R]; ``ropes``: [S, R]. Absorbed: ``keys``: [1, S, A],
    latents, and no ``values``. Expanded: ``keys``: [H, S, A], ``values``: [H, S, V]. All of one
    dtype, float32, float16 or bfloat16, and views whose last axis is dense: latents and ropes may
    be the two sides of a pool [S, A + R]. ``context`` and ``causal``: pieces as in
    `tree_attention_reference`; ``scale`` multiplies the scores. Returns float32[T, H, V], V being
    A where absorbed, and the log-sum-exps float32[T, H]: zero and ``-inf`` for a query that sees
    nothing.

    A caller with many layers plans once a step instead: `triton.TritonLatentAttention`.
    """
    if not serves(q.device):
        return mla_attention_reference(q, q_rope, keys, ropes, values, context, causal, scale=scale)
    from batchradix_kernels.mla_attention.triton import TritonLatentAttention

    num_queries, num_heads, key_dim = q.shape
    value_dim = key_dim if values is None else values.shape[2]
    kernel = TritonLatentAttention(
        absorbed=values is None,
        num_heads=num_heads,
        key_dim=key_dim,
        rope_dim=q_rope.shape[2],
        value_dim=value_dim,
        scale=scale,
        dtype=keys.dtype,
        device=q.device,
    )
    pieces = [np.array(list(kind), dtype=np.int64).reshape(-1, 4) for kind in (context, causal)]
    plan = kernel.plan(pieces[0], pieces[1], num_queries)
    kernel.attend(plan, q, q_rope, keys, ropes, values)
    out = torch.empty((num_queries, num_heads, value_dim), device=q.device)
    lse = torch.empty((num_queries, num_heads), device=q.device)
    kernel.merge(plan, out, lse)
    return out, lse
