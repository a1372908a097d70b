"""Everything one forward pass needs, in one object; no other state is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """``token_ids``, ``positions``: int64[T] on the device. ``attention`` is an `AttentionBackend`,
    or an `MlaBackend` for a model with latent attention; ``plan`` and ``pool`` belong to it and
    are passed through."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: Any
    plan: Any
    pool: Any
