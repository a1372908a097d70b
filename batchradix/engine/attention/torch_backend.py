"""Attention over tree nodes in plain torch operations: the backend that runs anywhere.

Every layer writes its keys and values to a `plain_pool`, attends piece by piece (`tree_plan`),
and merges what each query got by log-sum-exp in float32. Those stored in 8 bits are widened to the
model's dtype a piece at a time.

Legend: L levels, T queries, K key heads, G query heads a key head, E head dimension, B pieces
of a padded group, N queries of each, S slots of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from batchradix.engine.attention import plain_pool
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.tree_plan import (
    GroupLimits,
    PaddedGroup,
    Piece,
    plan_rounds,
)
from batchradix.engine.step import Step
from batchradix.types import I64
from batchradix_kernels.float8 import as_bytes, stored
from batchradix_kernels.lse_merge import lse_merge, merge_outputs
from batchradix_kernels.tree_attention import attend_padded, attend_piece


@dataclass(frozen=True, slots=True)
class _Group:
    """A `PaddedGroup` as indices into flattened tensors.

    ``queries``: [B·K·N] rows of q [K·T, G·E]; ``slots``: [2·B·K·S] rows of a layer's pool
    [2·K·slots, E]; ``targets``: [B·K·N] rows of the partial results [L·K·(T+1), G·E];
    ``bias``: float32[B·K, N·G, S].
    """

    num_pieces: int
    queries: torch.Tensor
    slots: torch.Tensor
    targets: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Round:
    num_levels: int
    alone: tuple[Piece, ...]
    groups: tuple[_Group, ...]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """``write_rows``: [T·K] rows of a layer's keys [K·slots, E]; ``partial``: float32
    [L, K, T + 1, G, E] and ``partial_lse`` [L, K, T + 1, G], the last query being where
    padding goes. A query without a piece at some level keeps zero and ``-inf`` there, which
    holds over all layers since they all write the same places.
    """

    num_tokens: int
    write_rows: torch.Tensor
    rounds: tuple[_Round, ...]
    partial: torch.Tensor
    partial_lse: torch.Tensor


class TorchAttention:
    """Implements `AttentionBackend`."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
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

    def load(
        self, pool: torch.Tensor, slot_start: int, k_LKnE: torch.Tensor, v_LKnE: torch.Tensor
    ) -> None:
        plain_pool.load(pool, slot_start, k_LKnE, v_LKnE)

    def plan(self, step: Step) -> TorchPlan:
        shape, group, num_tokens = self.shape, self._group, step.num_tokens
        limits = GroupLimits(group, shape.num_kv_heads, shape.head_dim)
        heads = np.arange(shape.num_kv_heads)
        rounds = tuple(
            _Round(r.num_levels, r.alone, tuple(self._flatten(g, num_tokens) for g in r.groups))
            for r in plan_rounds(step, limits)
        )
        size = (max(r.num_levels for r in rounds), shape.num_kv_heads, num_tokens + 1, group)
        return TorchPlan(
            num_tokens=num_tokens,
            write_rows=self._tensor((heads * self._num_slots + step.slots[:, None]).ravel()),
            rounds=rounds,
            partial=torch.zeros((*size, shape.head_dim), device=shape.device),
            partial_lse=torch.full(size, -math.inf, device=shape.device),
        )

    def run(
        self,
        layer: int,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        pool: torch.Tensor,
        plan: TorchPlan,
    ) -> torch.Tensor:
        shape, num_tokens = self.shape, plan.num_tokens
        keys, values = pool[layer].unbind(0)
        for target, new in ((keys, k_TKE), (values, v_TKE)):
            rows = as_bytes(stored(new, shape.pool_dtype)).reshape(-1, shape.head_dim)
            as_bytes(target).view(-1, shape.head_dim).index_copy_(0, plan.write_rows, rows)

        size = (num_tokens, shape.num_kv_heads, self._group, shape.head_dim)
        q_KTGE = torch.empty((size[1], size[0], *size[2:]), dtype=shape.dtype, device=shape.device)
        q_KTGE.copy_(q_THE.view(size).transpose(0, 1))
        merged = self._attend(q_KTGE, pool[layer], plan)
        out = torch.empty(size, dtype=shape.dtype, device=shape.device)
        return out.copy_(merged.transpose(0, 1)).view(num_tokens, -1)

    def _attend(self, q: torch.Tensor, pool: torch.Tensor, plan: TorchPlan) -> torch.Tensor:
        """[K, T, G, E] to float32 of the same shape; ``pool`` is one layer's."""
        partial, partial_lse = plan.partial, plan.partial_lse
        real = slice(0, plan.num_tokens)
        last = len(plan.rounds) - 1
        for index, current in enumerate(plan.rounds):
            if last > 0:
                if index > 0:
                    levels = slice(0, plan.rounds[index - 1].num_levels)
                    sums = lse_merge(partial[levels, :, real], partial_lse[levels, :, real])
                partial.zero_()
                partial_lse.fill_(-math.inf)
                if index > 0:
                    partial[0, :, real], partial_lse[0, :, real] = sums
            for piece in current.alone:
                self._run_alone(piece, q, pool, partial, partial_lse)
            for group in current.groups:
                self._run_group(group, q, pool, partial, partial_lse)
        levels = slice(0, plan.rounds[last].num_levels)
        return merge_outputs(partial[levels, :, real], partial_lse[levels, :, real])

    def _run_alone(
        self,
        piece: Piece,
        q: torch.Tensor,
        pool: torch.Tensor,
        partial: torch.Tensor,
        partial_lse: torch.Tensor,
    ) -> None:
        queries = slice(piece.query_start, piece.query_end)
        slots = slice(piece.slot_start, piece.slot_start + piece.num_slots)
        keys, values = pool[:, :, slots].to(self.shape.dtype).unbind(0)
        scale, causal = self.shape.scale, piece.causal
        out, lse = attend_piece(q[:, queries], keys, values, scale=scale, causal=causal)
        partial[piece.level, :, queries] = out
        partial_lse[piece.level, :, queries] = lse

    def _run_group(
        self,
        group: _Group,
        q: torch.Tensor,
        pool: torch.Tensor,
        partial: torch.Tensor,
        partial_lse: torch.Tensor,
    ) -> None:
        head_dim = self.shape.head_dim
        num_products, _, num_slots = group.bias.shape
        rows = q.view(-1, self._group * head_dim).index_select(0, group.queries)
        gathered = as_bytes(pool).view(-1, head_dim).index_select(0, group.slots).view(pool.dtype)
        keys, values = gathered.view(2, num_products, num_slots, head_dim).float().unbind(0)
        out, lse = attend_padded(
            rows.view(num_products, -1, head_dim), keys, values, group.bias, scale=self.shape.scale
        )
        width = self._group * head_dim
        partial.view(-1, width).index_copy_(0, group.targets, out.view(-1, width))
        partial_lse.view(-1, self._group).index_copy_(
            0, group.targets, lse.reshape(-1, self._group)
        )

    def _flatten(self, group: PaddedGroup, num_tokens: int) -> _Group:
        num_heads, num_slots = self.shape.num_kv_heads, self._num_slots
        num_pieces, most_queries, most_slots = group.visible.shape
        heads = np.arange(num_heads)[None, :, None]
        sides = np.arange(2)[:, None, None, None]
        levels = group.levels[:, None, None]
        hidden = np.where(group.visible, np.float32(0), np.float32(-np.inf))
        bias = np.broadcast_to(
            hidden[:, None, :, None, :],
            (num_pieces, num_heads, most_queries, self._group, most_slots),
        )
        # with one head the view is still the read-only broadcast, which torch warns of
        bias = np.require(
            bias.reshape(num_pieces * num_heads, most_queries * self._group, most_slots),
            requirements=["C", "W"],
        )
        return _Group(
            num_pieces=num_pieces,
            queries=self._tensor(heads * num_tokens + group.queries[:, None]),
            slots=self._tensor((sides * num_heads + heads) * num_slots + group.slots[:, None]),
            targets=self._tensor(
                (levels * num_heads + heads) * (num_tokens + 1) + group.targets[:, None]
            ),
            bias=torch.from_numpy(bias).to(self.shape.device),
        )

    def _tensor(self, array: I64) -> torch.Tensor:
        """The array flattened, on the device."""
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).ravel()).to(
            self.shape.device
        )
