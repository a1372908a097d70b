"""Attention over the pieces of a step in plain torch operations, and the merge of their results.

Every piece is attended to with all its queries (`tree_plan` says how); what each query got is
merged by log-sum-exp in float32. Keys and values may differ in size.

Legend: L levels, T queries, K key heads, G query heads a key head, E key, V value, B pieces of a
padded group, N queries of each, S slots of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from batchradix.engine.attention.tree_plan import (
    GroupLimits,
    PaddedGroup,
    Piece,
    StepPieces,
    plan_rounds,
)
from batchradix.types import I64
from batchradix_kernels.float8 import as_bytes
from batchradix_kernels.lse_merge import lse_merge, merge_outputs
from batchradix_kernels.tree_attention import attend_padded, attend_piece


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeShape:
    """Sizes of queries, keys and values; ``values_in_keys``: a value is the first part of its key,
    and there is no tensor of values."""

    num_kv_heads: int
    group: int
    k_dim: int
    v_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    values_in_keys: bool = False
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """A `PaddedGroup` as indices into flattened tensors.

    ``queries``: [B·K·N] rows of q [K·T, G·E]; ``slots``: [B·K·S] rows of keys [K·slots, E];
    ``targets``: [B·K·N] rows of the partial results [L·K·(T+1), G·V];
    ``bias``: [B·K, N·G, S], 0 or ``-inf``.
    """

    queries: torch.Tensor
    slots: torch.Tensor
    targets: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Round:
    num_levels: int
    alone: tuple[Piece, ...]
    groups: tuple[_Group, ...]


class Cascade:
    """The pieces of one step, over keys and values of ``num_slots`` slots; used by every layer of
    the same ``window``.

    ``partial``: float32[L, K, T + 1, G, V] and ``partial_lse`` [L, K, T + 1, G], the last query
    being where padding goes. A query without a piece at some level keeps zero and ``-inf`` there,
    which holds over all layers since they all write the same places.
    """

    def __init__(
        self,
        shape: CascadeShape,
        pieces: StepPieces,
        num_slots: int,
        window: int | None = None,
    ) -> None:
        self._shape = shape
        self._num_slots = num_slots
        self._num_tokens = pieces.num_tokens
        width = shape.k_dim if shape.values_in_keys else shape.k_dim + shape.v_dim
        limits = GroupLimits(shape.group, shape.num_kv_heads, width)
        self._rounds = tuple(
            _Round(r.num_levels, r.alone, tuple(self._flatten(g) for g in r.groups))
            for r in plan_rounds(pieces, limits, window)
        )
        num_levels = max(r.num_levels for r in self._rounds)
        size = (num_levels, shape.num_kv_heads, self._num_tokens + 1, shape.group)
        self._partial = torch.zeros((*size, shape.v_dim), device=shape.device)
        self._partial_lse = torch.full(size, -math.inf, device=shape.device)

    def outputs(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None
    ) -> torch.Tensor:
        """``q``: contiguous [K, T, G, E]; ``keys``, ``values``: contiguous [K, slots, E] and
        [K, slots, V]. Returns float32[K, T, G, V]; every query must have a piece."""
        return merge_outputs(*self._last_parts(q, keys, values))

    def outputs_and_lse(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same and the log-sum-exps of the scores, float32[K, T, G]."""
        return lse_merge(*self._last_parts(q, keys, values))

    def _last_parts(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is left to merge: [L, K, T, G, V] and [L, K, T, G]."""
        partial, partial_lse = self._partial, self._partial_lse
        real = slice(0, self._num_tokens)
        last = len(self._rounds) - 1
        for index, current in enumerate(self._rounds):
            if last > 0:
                if index > 0:
                    levels = slice(0, self._rounds[index - 1].num_levels)
                    sums = lse_merge(partial[levels, :, real], partial_lse[levels, :, real])
                partial.zero_()
                partial_lse.fill_(-math.inf)
                if index > 0:
                    partial[0, :, real], partial_lse[0, :, real] = sums
            for piece in current.alone:
                self._run_alone(piece, q, keys, values)
            for group in current.groups:
                self._run_group(group, q, keys, values)
        levels = slice(0, self._rounds[last].num_levels)
        return partial[levels, :, real], partial_lse[levels, :, real]

    def _run_alone(
        self, piece: Piece, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None
    ) -> None:
        queries = slice(piece.query_start, piece.query_end)
        slots = slice(piece.slot_start, piece.slot_start + piece.num_slots)
        k = v = keys[:, slots].to(self._shape.dtype)
        if values is not None:
            v = values[:, slots].to(self._shape.dtype)
        scale, cap, causal = self._shape.scale, self._shape.softcap, piece.causal
        out, lse = attend_piece(q[:, queries], k, v, scale=scale, causal=causal, softcap=cap)
        self._partial[piece.level, :, queries] = out[..., : self._shape.v_dim]
        self._partial_lse[piece.level, :, queries] = lse

    def _run_group(
        self, group: _Group, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None
    ) -> None:
        shape = self._shape
        num_products, _, num_slots = group.bias.shape
        rows = q.view(-1, shape.group * shape.k_dim).index_select(0, group.queries)
        k = v = self._gather(keys, group).view(num_products, num_slots, -1)
        if values is not None:
            v = self._gather(values, group).view(num_products, num_slots, -1)
        rows = rows.view(num_products, -1, shape.k_dim)
        out, lse = attend_padded(rows, k, v, group.bias, scale=shape.scale, softcap=shape.softcap)
        out = out[..., : shape.v_dim].reshape(-1, shape.group * shape.v_dim)
        width = shape.group * shape.v_dim
        self._partial.view(-1, width).index_copy_(0, group.targets, out)
        self._partial_lse.view(-1, shape.group).index_copy_(
            0, group.targets, lse.reshape(-1, shape.group)
        )

    def _gather(self, sides: torch.Tensor, group: _Group) -> torch.Tensor:
        """The group's rows of keys or values [K, slots, n], [B·K·S, n] in the model's dtype."""
        rows = as_bytes(sides).reshape(-1, sides.shape[-1]).index_select(0, group.slots)
        return rows.view(sides.dtype).to(self._shape.dtype)

    def _flatten(self, group: PaddedGroup) -> _Group:
        num_heads, num_tokens = self._shape.num_kv_heads, self._num_tokens
        num_pieces, most_queries, most_slots = group.visible.shape
        heads = np.arange(num_heads)[None, :, None]
        levels = group.levels[:, None, None]
        hidden = np.where(group.visible, np.float32(0), np.float32(-np.inf))
        bias = np.broadcast_to(
            hidden[:, None, :, None, :],
            (num_pieces, num_heads, most_queries, self._shape.group, most_slots),
        )
        # with one head the view is still the read-only broadcast, which torch warns of
        bias = np.require(
            bias.reshape(num_pieces * num_heads, most_queries * self._shape.group, most_slots),
            requirements=["C", "W"],
        )
        return _Group(
            queries=self._tensor(heads * num_tokens + group.queries[:, None]),
            slots=self._tensor(heads * self._num_slots + group.slots[:, None]),
            targets=self._tensor(
                (levels * num_heads + heads) * (num_tokens + 1) + group.targets[:, None]
            ),
            bias=torch.from_numpy(bias).to(self._shape.device, self._shape.dtype),
        )

    def _tensor(self, array: I64) -> torch.Tensor:
        """The array flattened, on the device."""
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).ravel()).to(
            self._shape.device
        )
