"""The first half of a gated feed-forward (SwiGLU, Shazeer 2020): one layer and its gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from batchradix.checkpoint.model_config import Activation, ClampedSwiglu
from batchradix.engine.layers.linear import Bf16Linear, Linear, Rows
from batchradix_kernels.quantise_rows import quantise_rows
from batchradix_kernels.swiglu import swiglu, swiglu_int8


class GatedLinear(Protocol):
    """``x`` [T, D], in 8 bits where ``is_quantised``, to [T, F], in 8 bits where asked for."""

    @property
    def is_quantised(self) -> bool: ...

    def __call__(self, x: Rows, *, to_int8: bool) -> Rows: ...


Gate = Callable[[torch.Tensor], torch.Tensor]
"""Gates and then what they gate, [T, 2 · F], to [T, F] of the same dtype."""


def gate_of(activation: Activation, clamped: ClampedSwiglu | None = None) -> Gate | None:
    """None for SwiGLU, which kernels have."""
    if clamped is not None:
        return partial(clamped_swiglu, clamped)
    return None if activation == "silu" else geglu


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) · up, with the approximation by tanh (Gemma)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def clamped_swiglu(limits: ClampedSwiglu, gate_up: torch.Tensor) -> torch.Tensor:
    """As `ClampedSwiglu` says (gpt-oss)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limits.limit)
    up = up.clamp(-limits.limit, limits.limit)
    return (gate * (limits.alpha * gate).sigmoid() * (up + 1)).to(gate_up.dtype)


class TwoSteps:
    """``linear`` gives gates and then what they gate, [T, 2 · F]; ``gate`` None is SwiGLU."""

    def __init__(self, linear: Linear, gate: Gate | None = None) -> None:
        self.linear = linear
        self.gate = gate

    @property
    def is_quantised(self) -> bool:
        return self.linear.is_quantised

    def __call__(self, x: Rows, *, to_int8: bool) -> Rows:
        gate_up = self.linear(x)
        if self.gate is not None:
            out = self.gate(gate_up)
            return quantise_rows(out) if to_int8 else out
        return swiglu_int8(gate_up) if to_int8 else swiglu(gate_up)


class Bf16Gated:
    """Both in one kernel; gates are not rounded before they are applied."""

    is_quantised = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.linear = Bf16Linear(weight, bias, gated=True)

    def __call__(self, x: Rows, *, to_int8: bool) -> Rows:
        out = self.linear(x)
        return quantise_rows(out) if to_int8 else out
