"""The gated activation of Llama's feed-forward layer in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Same contract as `swiglu`, on any device and in any floating dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
