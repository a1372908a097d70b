"""Attention of stacked queries over the pieces of a radix tree, with log-sum-exps to merge.

A piece is a run of slots in a KV pool and the queries that attend to it. Shared pieces are
attended once with the queries of every row below them, as matrix-matrix products on strided
views of the pool; many small pieces are padded into one batched product. What the pieces of
one query give is merged by `batchradix_kernels.lse_merge`.

Shapes: K key heads, G query heads a key head, n queries, s slots, E key,
V value, N rows (n · G) of a padded piece, B padded pieces times K.
"""

from __future__ import annotations

import torch

from batchradix_kernels.tree_attention.flash_cpu import (
    attend_padded_flash_cpu,
    attend_piece_flash_cpu,
    is_available,
)
from batchradix_kernels.tree_attention.matmul import attend_padded_matmul, attend_piece_matmul
from batchradix_kernels.tree_attention.reference import tree_attention_reference

__all__ = ["attend_padded", "attend_piece", "tree_attention_reference"]


def attend_piece(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``n`` queries over the ``s`` slots of one piece; inputs may be views.

    ``q``: [K, n, G, E]; ``k``: [K, s, E]; ``v``: [K, s, V], the same dtype. ``causal`` needs
    ``s == n``
    and lets query ``i`` see the first ``i + 1`` slots. ``scale`` multiplies the scores,
    which with a ``softcap`` then become ``softcap * tanh(score / softcap)``.
    Scores and softmax are float32 whatever the dtype.
    Returns the output [K, n, G, V] (dtype of ``q`` or float32) and float32[K, n, G].
    """
    if softcap is None and _may_be_flash(q, v):
        out, lse = attend_piece_flash_cpu(q, k, v, scale=scale, causal=causal)
        if not _may_hide_nan(lse):
            return out, lse
    return attend_piece_matmul(q, k, v, scale=scale, causal=causal, softcap=softcap)


def attend_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of many small pieces padded to one size.

    ``q``: [B, N, E]; ``k``: [B, s, E]; ``v``: [B, s, V]; ``bias``: [B, N, s], 0 where the
    row sees the slot and ``-inf`` where not. Every row sees at least one slot, and what pads ``k``
    and ``v`` must be finite wherever the piece itself is. Returns float32[B, N, V], float32[B, N].
    """
    narrow = q.dtype == k.dtype == torch.bfloat16  # in float32 flash attention is no faster
    if narrow and softcap is None and _may_be_flash(q, v):
        out, lse = attend_padded_flash_cpu(q, k, v, bias, scale=scale)
        if not _may_hide_nan(lse):
            return out, lse
    return attend_padded_matmul(q, k, v, bias, scale=scale, softcap=softcap)


def _may_be_flash(q: torch.Tensor, v: torch.Tensor) -> bool:
    return q.device.type == "cpu" and v.shape[-1] <= q.shape[-1] and is_available()


def _may_hide_nan(lse: torch.Tensor) -> bool:
    """The fused kernel takes a query whose every score is NaN for one that sees no key and gives
    it zeros, which would hide a broken row; seldom is a sum really zero."""
    return bool((lse == 0).any())
