"""Writing the latents and rope keys of new tokens to their slots in a pool."""

from __future__ import annotations

import torch

from batchradix_kernels.latent_store.reference import latent_store_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["latent_store", "latent_store_reference"]


def latent_store(
    latents: torch.Tensor, ropes: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor
) -> None:
    """Writes token ``t`` to slot ``slots[t]``, or nowhere where that is negative (padding).

    ``latents``: [T, C], ``ropes``: [T, R], any float dtype, views whose last axis is dense;
    ``slots``: int32[T], those that are not negative all different; ``pool``: [S, C + R] of one
    layer, contiguous, whose dtype the numbers are rounded to.
    """
    if serves(pool.device):
        from batchradix_kernels.latent_store.triton import latent_store_triton

        latent_store_triton(latents, ropes, slots, pool)
    else:
        latent_store_reference(latents, ropes, slots, pool)
