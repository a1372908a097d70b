"""Latent attention through the C kernels: one key head as wide as latent and rope key.

All pieces are attended to absorbed, by all heads together; what they get goes through ``w_uv`` once
a query. The kernels want keys and values in two layouts, so a token takes twice what other backends
keep of it.

Legend: T queries, H heads, C latent, R rope, P nope, V value, n slots.
"""

from __future__ import annotations

import torch

from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.cpu_backend import CpuAttention, CpuPlans
from batchradix.engine.attention.mla_base import MlaShape, UpProjection
from batchradix.engine.step import Step
from batchradix.types import I64
from batchradix_kernels.tree_attention.cpu import PairedPool


class CpuMla:
    """Implements `MlaBackend`; its pool holds latent and rope key ``num_copies`` times."""

    num_copies = 2

    def __init__(self, shape: MlaShape) -> None:
        self.shape = shape
        self._heads = CpuAttention(one_key_head(shape))

    def allocate(self, num_slots: int) -> PairedPool:
        return self._heads.allocate(num_slots)

    def move(self, pool: PairedPool, moves: I64) -> None:
        self._heads.move(pool, moves)

    def poison(self, pool: PairedPool, slot_start: int, num_slots: int) -> None:
        self._heads.poison(pool, slot_start, num_slots)

    def export(self, pool: PairedPool, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
        keys, _ = self._heads.export(pool, slots)
        rank = self.shape.kv_lora_rank
        return keys[..., :rank].contiguous(), keys[..., rank:].contiguous()

    def load(self, pool: PairedPool, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        keys = torch.cat((k, v), dim=-1)
        self._heads.load(pool, slot_start, keys, keys)

    def plan(self, step: Step) -> CpuPlans:
        return self._heads.plan(step)

    def run(
        self,
        layer: int,
        q_nope_THP: torch.Tensor,
        q_rope_THR: torch.Tensor,
        latent_TC: torch.Tensor,
        k_rope_TR: torch.Tensor,
        up: UpProjection,
        pool: PairedPool,
        plan: CpuPlans,
    ) -> torch.Tensor:
        shape = self.shape
        num_tokens = len(latent_TC)
        size = (num_tokens, shape.num_heads, shape.width)
        q = torch.empty(size, dtype=shape.dtype)
        absorbed = torch.bmm(q_nope_THP.to(shape.dtype).transpose(0, 1), up.w_uk_HPC)
        q[:, :, : shape.kv_lora_rank] = absorbed.transpose(0, 1)
        q[:, :, shape.kv_lora_rank :] = q_rope_THR
        row = torch.cat((latent_TC, k_rope_TR), dim=-1)[:, None]
        out = self._heads.run(layer, q, row, row, pool, plan).view(size)
        latent_HTC = out[:, :, : shape.kv_lora_rank].transpose(0, 1)
        return torch.bmm(latent_HTC, up.w_uv_HCV).transpose(0, 1).reshape(num_tokens, -1)


def one_key_head(shape: MlaShape) -> AttentionShape:
    """What the kernels are asked for; where they serve it, `CpuMla` serves."""
    return AttentionShape(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=1,
        head_dim=shape.width,
        scale=shape.scale,
        dtype=shape.dtype,
        device=shape.device,
        batch_invariant=shape.batch_invariant,
    )
