"""Everything one forward pass needs, in one object; no other state is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from batchradix.engine.attention.base import AttentionBackend


@dataclass(frozen=True, slots=True)
class Batch:
    """``token_ids``, ``positions``: int64[T] on the device. ``plan`` and ``pool`` belong to
    ``attention`` and are passed through to it."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBackend
    plan: Any
    pool: Any
