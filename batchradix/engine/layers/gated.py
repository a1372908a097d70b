"""The first half of a gated feed-forward (SwiGLU, Shazeer 2020): one layer and its gates."""

from __future__ import annotations

from typing import Protocol

from batchradix.checkpoint.model_config import Activation, ClampedSwiglu
from batchradix.engine.layers.linear import Bf16Linear, GroupedLinear, Linear, Rows
from batchradix_kernels.quantise_rows import quantise_rows
from batchradix_kernels.swiglu import SILU, Gating, swiglu, swiglu_int8


class GatedLinear(Protocol):
    """``x`` [T, D], in 8 bits where ``is_quantised``, to [T, F], in 8 bits where asked for."""

    @property
    def is_quantised(self) -> bool: ...

    def __call__(self, x: Rows, *, to_int8: bool) -> Rows: ...


def gating_of(activation: Activation, clamped: ClampedSwiglu | None = None) -> Gating:
    """How the gates of a config are applied."""
    if clamped is not None:
        return Gating("clamped", clamped.alpha, clamped.limit)
    return Gating(activation)


class TwoSteps:
    """``linear`` gives gates and then what they gate, [T, 2 · F]."""

    def __init__(self, linear: Linear, gating: Gating = SILU) -> None:
        self.linear = linear
        self.gating = gating

    @property
    def is_quantised(self) -> bool:
        return self.linear.is_quantised

    def __call__(self, x: Rows, *, to_int8: bool) -> Rows:
        gate_up = self.linear(x)
        return (swiglu_int8 if to_int8 else swiglu)(gate_up, self.gating)


class OneStep:
    """Both in one kernel, that of a gated ``linear``; gates are not rounded before they are
    applied."""

    is_quantised = False

    def __init__(self, linear: Bf16Linear | GroupedLinear) -> None:
        self.linear = linear

    def __call__(self, x: Rows, *, to_int8: bool) -> Rows:
        out = self.linear(x)
        return quantise_rows(out) if to_int8 else out
