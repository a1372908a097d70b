"""Moving keys and values within a pool, in plain torch."""

from __future__ import annotations

import torch

from batchradix_kernels.float8 import as_bytes


def kv_move_reference(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Same contract as `kv_move`."""
    pool = as_bytes(pool)
    pool.index_copy_(-2, targets.long(), pool.index_select(-2, sources.long()))
