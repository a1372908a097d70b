"""Writing new keys and values to a pool, in plain torch."""

from __future__ import annotations

import torch


def kv_store_reference(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor
) -> None:
    """Same contract as `kv_store`."""
    wanted = slots >= 0
    at = slots[wanted].long()
    for side, new in ((0, k), (1, v)):
        pool[side].index_copy_(1, at, new[wanted].transpose(0, 1).to(pool.dtype))
