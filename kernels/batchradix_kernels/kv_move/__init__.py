"""Moving keys and values from slots to other slots of a pool."""

from __future__ import annotations

import torch

from batchradix_kernels.kv_move.reference import kv_move_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["kv_move", "kv_move_reference"]


def kv_move(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies slot ``sources[i]`` to slot ``targets[i]`` on every plane, all reads first.

    ``pool``: [..., S, E], contiguous; ``sources``, ``targets``: int32[n] on its device. Targets
    all differ; a slot may be source and target. Takes memory for n slots of every plane.
    """
    if serves(pool.device):
        from batchradix_kernels.kv_move.triton import kv_move_triton

        kv_move_triton(pool, sources, targets)
    else:
        kv_move_reference(pool, sources, targets)
