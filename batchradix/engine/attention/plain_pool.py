"""A pool of keys and values that is one tensor [layers, 2, K, slots, E].

The slots of a piece are a strided view of it, and the keys of one head lie together.
Arguments are those of `AttentionBackend`.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.cache.pool import slots_of
from batchradix.types import I64
from batchradix_kernels.float8 import as_bytes
from batchradix_kernels.kv_move import kv_move, kv_move_reference


def allocate(shape: AttentionShape, num_slots: int) -> torch.Tensor:
    size = (shape.num_layers, 2, shape.num_kv_heads, num_slots, shape.head_dim)
    return torch.empty(size, dtype=shape.pool_dtype, device=shape.device)


def move(pool: torch.Tensor, moves: I64, *, triton: bool) -> None:
    """A layer at a time, so that the copies need little room; ``triton`` allows its kernels."""
    if len(moves) == 0:
        return
    sources = _slots(slots_of((source, n) for source, _, n in moves), pool.device)
    targets = _slots(slots_of((target, n) for _, target, n in moves), pool.device)
    for layer in pool:
        (kv_move if triton else kv_move_reference)(layer, sources, targets)


def poison(pool: torch.Tensor, slot_start: int, num_slots: int) -> None:
    pool[:, :, :, slot_start : slot_start + num_slots] = math.nan


def export(pool: torch.Tensor, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
    held = as_bytes(pool).index_select(3, _slots(slots, pool.device))
    keys, values = held.view(pool.dtype).unbind(1)
    return keys, values


def load(pool: torch.Tensor, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
    slots = slice(slot_start, slot_start + k.shape[2])
    as_bytes(pool)[:, 0, :, slots] = as_bytes(k)
    as_bytes(pool)[:, 1, :, slots] = as_bytes(v)


def _slots(slots: I64, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int32)).to(device)
