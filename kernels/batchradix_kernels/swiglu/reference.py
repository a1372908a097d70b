"""The gated activation of a feed-forward layer in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Gating:
    """How gates are applied. ``silu``: silu(gate) · up. ``gelu_tanh``: gelu(gate) · up, by tanh
    (Gemma). ``clamped``: gate · sigmoid(alpha · gate) · (up + 1), gates above ``limit`` and what
    they gate beyond ``±limit`` being cut to it (gpt-oss)."""

    kind: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    alpha: float = 1.0
    limit: float = math.inf


SILU = Gating()


def swiglu_reference(gate_up: torch.Tensor, gating: Gating = SILU) -> torch.Tensor:
    """Same contract as `swiglu`, on any device and in any floating dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gating == SILU:
        return functional.silu(gate).mul_(up)
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate.to(wide), up.to(wide)
    if gating.kind == "gelu_tanh":
        out = functional.gelu(gate, approximate="tanh") * up
    else:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
        out = gate * (gating.alpha * gate).sigmoid() * (up + 1)
    return out.to(gate_up.dtype)
