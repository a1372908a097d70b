"""Writing the keys and values of new tokens to their slots in a pool."""

from __future__ import annotations

import torch

from batchradix_kernels.kv_store.reference import kv_store_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["kv_store", "kv_store_reference"]


def kv_store(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> None:
    """Writes token ``t`` to slot ``slots[t]``, or nowhere where that is negative (padding).

    ``k``, ``v``: [T, K, E], any float dtype, views whose last axis is dense; ``slots``: int32[T],
    those that are not negative all different; ``pool``: [2, K, S, E], keys and values of one
    layer, contiguous, whose dtype the numbers are rounded to (`float8.stored`).
    """
    if serves(pool.device):
        from batchradix_kernels.kv_store.triton import kv_store_triton

        kv_store_triton(k, v, slots, pool)
    else:
        kv_store_reference(k, v, slots, pool)
