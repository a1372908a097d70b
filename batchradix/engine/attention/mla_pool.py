"""A pool of latents that is one tensor [layers, slots, C + R]: the latent, then the rope key.

Arguments are those of `MlaBackend`.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from batchradix.engine.attention.mla_base import MlaShape
from batchradix.engine.cache.pool import slots_of
from batchradix.types import I64


def allocate(shape: MlaShape, num_slots: int) -> torch.Tensor:
    size = (shape.num_layers, num_slots, shape.width)
    return torch.empty(size, dtype=shape.dtype, device=shape.device)


def write(
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    latent_TC: torch.Tensor,
    k_rope_TR: torch.Tensor,
) -> None:
    """The step's own tokens; ``slots``: int64[T] on the device."""
    rows = torch.cat((latent_TC, k_rope_TR), dim=1).to(pool.dtype)
    pool[layer].index_copy_(0, slots, rows)


def move(pool: torch.Tensor, moves: I64) -> None:
    """A layer at a time, so that the copies need little room."""
    if len(moves) == 0:
        return
    sources = _slots(slots_of((source, n) for source, _, n in moves), pool.device)
    targets = _slots(slots_of((target, n) for _, target, n in moves), pool.device)
    for layer in pool:
        layer.index_copy_(0, targets, layer.index_select(0, sources))


def poison(pool: torch.Tensor, slot_start: int, num_slots: int) -> None:
    pool[:, slot_start : slot_start + num_slots] = math.nan


def export(pool: torch.Tensor, slots: I64, kv_lora_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    taken = pool.index_select(1, _slots(slots, pool.device)).unsqueeze(1)
    return taken[..., :kv_lora_rank], taken[..., kv_lora_rank:]


def load(pool: torch.Tensor, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
    slots = slice(slot_start, slot_start + k.shape[2])
    pool[:, slots] = torch.cat((k, v), dim=-1).squeeze(1)


def _slots(slots: I64, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int64)).to(device)
