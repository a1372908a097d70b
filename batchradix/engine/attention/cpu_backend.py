"""Attention over tree nodes through the C kernels of the kernel library (`tree_attention.cpu`)."""

from __future__ import annotations

import math

import numpy as np
import torch

from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.window_plan import plan_windows
from batchradix.engine.cache.pool import slots_of
from batchradix.engine.step import Step
from batchradix.types import I64
from batchradix_kernels.tree_attention.cpu import (
    CpuTreeAttention,
    CpuTreePlan,
    PairedPool,
    is_supported,
)

CpuPlans = tuple[CpuTreePlan, ...]
"""Of each layer; those of one window are the same."""


class CpuAttention:
    """Implements `AttentionBackend`."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self._kernel = CpuTreeAttention(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.scale,
            dtype=shape.dtype,
            softcap=shape.softcap,
        )
        self._num_slots = 0

    @staticmethod
    def serves(shape: AttentionShape) -> bool:
        """Whether the kernels were built and know this shape, dtype and device."""
        return (
            shape.device.type == "cpu"
            and shape.pool_dtype == shape.dtype
            and is_supported(shape.dtype, shape.head_dim)
        )

    @staticmethod
    def missing(shape: AttentionShape) -> str:
        """Why it does not serve."""
        if shape.device.type != "cpu":
            return f"the model is on {shape.device.type}"
        if shape.pool_dtype != shape.dtype:
            return "there is none for keys and values in 8 bits (`kv_dtype` fp8)"
        if not is_supported(torch.float32, 64):
            return "they were not built, which takes a C compiler when batchradix is installed"
        if not is_supported(torch.float32, shape.head_dim):
            return f"there is none for heads of {shape.head_dim}"
        kind = str(shape.dtype).removeprefix("torch.")
        return f"there is none for `dtype` {kind}, only for bfloat16 and float32"

    def allocate(self, num_slots: int) -> PairedPool:
        self._num_slots = num_slots
        return self._kernel.allocate(self.shape.num_layers, num_slots)

    def move(self, pool: PairedPool, moves: I64) -> None:
        if len(moves) == 0:
            return
        sources = slots_of((source, n) for source, _, n in moves)
        targets = slots_of((target, n) for _, target, n in moves)
        for layer in range(self.shape.num_layers):
            pool.write(layer, targets, pool.read(layer, sources))

    def poison(self, pool: PairedPool, slot_start: int, num_slots: int) -> None:
        pool.fill(slot_start, num_slots, math.nan)

    def export(self, pool: PairedPool, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
        layers = [pool.read(layer, slots) for layer in range(self.shape.num_layers)]
        keys, values = torch.stack(layers).unbind(1)
        return keys, values

    def load(self, pool: PairedPool, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = np.arange(slot_start, slot_start + k.shape[2])
        for layer, kv in enumerate(torch.stack((k, v), dim=1)):
            pool.write(layer, slots, kv)

    def plan(self, step: Step) -> CpuPlans:
        windows = self.shape.windows_within(step)
        of_window = {window: self._plan(step, window) for window in dict.fromkeys(windows)}
        return tuple(of_window[window] for window in windows)

    def _plan(self, step: Step, window: int | None) -> CpuTreePlan:
        kernel, num_slots = self._kernel, self._num_slots
        if self.shape.batch_invariant:
            cut = plan_windows(step)
            return kernel.plan_windows(step.slots, cut.runs, cut.parts, num_slots, window=window)
        return kernel.plan(step.slots, step.context, step.causal, num_slots, window=window)

    def run(
        self,
        layer: int,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        pool: PairedPool,
        plan: CpuPlans,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernel.run(plan[layer], pool, layer, q_THE, k_TKE, v_TKE, sinks=sinks_H)
