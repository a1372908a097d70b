"""Attention over tree nodes in plain torch operations: the backend that runs anywhere.

Every layer writes its keys and values to a `plain_pool` and attends by a `Cascade`. Those stored in
8 bits are widened to the model's dtype a piece at a time.

Legend: T queries, K key heads, G query heads a key head, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from batchradix.engine.attention import plain_pool
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.cascade import Cascade, CascadeShape
from batchradix.engine.step import Step
from batchradix.types import I64
from batchradix_kernels.float8 import as_bytes, stored


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """``write_rows``: [T·K] rows of a layer's keys [K·slots, E]; ``cascades``: of each layer,
    those of one window being the same."""

    num_tokens: int
    write_rows: torch.Tensor
    cascades: tuple[Cascade, ...]


class TorchAttention:
    """Implements `AttentionBackend`."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
        self._cascade_shape = CascadeShape(
            num_kv_heads=shape.num_kv_heads,
            group=self._group,
            k_dim=shape.head_dim,
            v_dim=shape.head_dim,
            scale=shape.scale,
            dtype=shape.dtype,
            device=shape.device,
            softcap=shape.softcap,
        )
        self._num_slots = 0

    def allocate(self, num_slots: int) -> torch.Tensor:
        self._num_slots = num_slots
        return plain_pool.allocate(self.shape, num_slots)

    def move(self, pool: torch.Tensor, moves: I64) -> None:
        plain_pool.move(pool, moves, triton=False)

    def poison(self, pool: torch.Tensor, slot_start: int, num_slots: int) -> None:
        plain_pool.poison(pool, slot_start, num_slots)

    def export(self, pool: torch.Tensor, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
        return plain_pool.export(pool, slots)

    def load(self, pool: torch.Tensor, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        plain_pool.load(pool, slot_start, k, v)

    def plan(self, step: Step) -> TorchPlan:
        heads = np.arange(self.shape.num_kv_heads)
        rows = (heads * self._num_slots + step.slots[:, None]).ravel()
        windows = self.shape.windows_within(step)
        cascades = {
            window: Cascade(self._cascade_shape, step, self._num_slots, window)
            for window in dict.fromkeys(windows)
        }
        return TorchPlan(
            num_tokens=step.num_tokens,
            write_rows=torch.from_numpy(rows).to(self.shape.device),
            cascades=tuple(cascades[window] for window in windows),
        )

    def run(
        self,
        layer: int,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        pool: torch.Tensor,
        plan: TorchPlan,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape, num_tokens = self.shape, plan.num_tokens
        keys, values = pool[layer].unbind(0)
        for target, new in ((keys, k_TKE), (values, v_TKE)):
            rows = as_bytes(stored(new, shape.pool_dtype)).reshape(-1, shape.head_dim)
            as_bytes(target).view(-1, shape.head_dim).index_copy_(0, plan.write_rows, rows)

        size = (num_tokens, shape.num_kv_heads, self._group, shape.head_dim)
        q_KTGE = torch.empty((size[1], size[0], *size[2:]), dtype=shape.dtype, device=shape.device)
        q_KTGE.copy_(q_THE.view(size).transpose(0, 1))
        cascade = plan.cascades[layer]
        if sinks_H is None:
            merged = cascade.outputs(q_KTGE, keys, values)
        else:
            merged, lse_KTG = cascade.outputs_and_lse(q_KTGE, keys, values)
            sinks = sinks_H.view(shape.num_kv_heads, 1, self._group)
            merged = merged * torch.sigmoid(lse_KTG - sinks)[..., None]
        out = torch.empty(size, dtype=shape.dtype, device=shape.device)
        return out.copy_(merged.transpose(0, 1)).view(num_tokens, -1)
