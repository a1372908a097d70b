"""Writing new keys and values to a pool, in plain torch."""

from __future__ import annotations

import torch

from batchradix_kernels.float8 import as_bytes, stored


def kv_store_reference(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor
) -> None:
    """Same contract as `kv_store`."""
    wanted = slots >= 0
    at = slots[wanted].long()
    for side, new in ((0, k), (1, v)):
        rounded = stored(new[wanted].transpose(0, 1), pool.dtype)
        as_bytes(pool)[side].index_copy_(1, at, as_bytes(rounded))
