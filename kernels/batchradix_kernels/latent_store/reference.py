"""Writing new latents and rope keys to a pool, in plain torch."""

from __future__ import annotations

import torch


def latent_store_reference(
    latents: torch.Tensor, ropes: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor
) -> None:
    """Same contract as `latent_store`."""
    wanted = slots >= 0
    new = torch.cat((latents[wanted].to(pool.dtype), ropes[wanted].to(pool.dtype)), dim=1)
    pool.index_copy_(0, slots[wanted].long(), new)
