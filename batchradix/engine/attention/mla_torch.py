"""Latent attention over tree nodes in plain torch operations: the backend that runs anywhere.

Pieces attended to absorbed are one `Cascade` over the pool itself: one key head whose keys are
latent and rope key and whose values are the latents. What they give is merged in the latent space
and goes through ``w_uv`` once a query. The others are cascades over keys and values made of the
latents, a bounded number of slots at a time. Both are merged by log-sum-exp in float32.

Legend: T queries, H heads, C latent, R rope, P nope, V value, n slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from batchradix.engine.attention import mla_pool
from batchradix.engine.attention.cascade import Cascade, CascadeShape
from batchradix.engine.attention.mla_base import (
    Form,
    MlaShape,
    Pieces,
    UpProjection,
    pieces_by_form,
    select_pieces,
)
from batchradix.engine.cache.pool import slots_of
from batchradix.engine.step import Step, i64_table
from batchradix.types import I64
from batchradix_kernels.lse_merge import lse_merge

MAX_EXPANDED = 1 << 26  # elements of keys and values that are made at a time


@dataclass(frozen=True, slots=True)
class _Part:
    """A cascade of some of the step's queries, int64 on the device, or None for all of them;
    ``slots``, int64[n] on the device: those to expand for it, None where it is absorbed."""

    queries: torch.Tensor | None
    cascade: Cascade
    slots: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlaTorchPlan:
    """``slots``: int64[T] on the device, where the step's own tokens go."""

    num_tokens: int
    slots: torch.Tensor
    parts: tuple[_Part, ...]


class TorchMla:
    """Implements `MlaBackend`; ``form`` takes one form for all pieces, for tests."""

    def __init__(
        self, shape: MlaShape, form: Form | None = None, max_expanded: int = MAX_EXPANDED
    ) -> None:
        self.shape = shape
        self._form = form
        self._num_slots = 0
        widths = shape.nope_dim + shape.rope_dim + shape.v_dim
        self._slots_at_once = max(1, max_expanded // (shape.num_heads * widths))
        self._absorbed = CascadeShape(
            num_kv_heads=1,
            group=shape.num_heads,
            k_dim=shape.width,
            v_dim=shape.kv_lora_rank,
            scale=shape.scale,
            dtype=shape.dtype,
            device=shape.device,
            values_in_keys=True,
        )
        self._expanded = CascadeShape(
            num_kv_heads=shape.num_heads,
            group=1,
            k_dim=shape.nope_dim + shape.rope_dim,
            v_dim=shape.v_dim,
            scale=shape.scale,
            dtype=shape.dtype,
            device=shape.device,
        )

    def allocate(self, num_slots: int) -> torch.Tensor:
        self._num_slots = num_slots
        return mla_pool.allocate(self.shape, num_slots)

    def move(self, pool: torch.Tensor, moves: I64) -> None:
        mla_pool.move(pool, moves)

    def poison(self, pool: torch.Tensor, slot_start: int, num_slots: int) -> None:
        mla_pool.poison(pool, slot_start, num_slots)

    def export(self, pool: torch.Tensor, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_pool.export(pool, slots, self.shape.kv_lora_rank)

    def load(self, pool: torch.Tensor, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        mla_pool.load(pool, slot_start, k, v)

    def plan(self, step: Step) -> MlaTorchPlan:
        absorbed, expanded = pieces_by_form(step, self.shape, self._form)
        parts = []
        if absorbed.num_tokens:
            cascade = Cascade(self._absorbed, absorbed, self._num_slots)
            parts.append(_Part(self._some(absorbed, step), cascade))
        for pieces, slots in expansion_batches(expanded, self._slots_at_once):
            cascade = Cascade(self._expanded, pieces, len(slots))
            parts.append(_Part(self._some(pieces, step), cascade, self._tensor(slots)))
        return MlaTorchPlan(
            num_tokens=step.num_tokens, slots=self._tensor(step.slots), parts=tuple(parts)
        )

    def run(
        self,
        layer: int,
        q_nope_THP: torch.Tensor,
        q_rope_THR: torch.Tensor,
        latent_TC: torch.Tensor,
        k_rope_TR: torch.Tensor,
        up: UpProjection,
        pool: torch.Tensor,
        plan: MlaTorchPlan,
    ) -> torch.Tensor:
        shape = self.shape
        mla_pool.write(pool, layer, plan.slots, latent_TC, k_rope_TR)
        sums = _Sums(plan, shape)
        for part in plan.parts:
            q_nope, q_rope = _rows(q_nope_THP, part.queries), _rows(q_rope_THR, part.queries)
            if part.slots is None:
                found = self._absorb(part.cascade, q_nope, q_rope, up, pool[layer])
            else:
                rows = pool[layer].index_select(0, part.slots)
                found = self._expand(part.cascade, q_nope, q_rope, up, rows)
            sums.add(part.queries, *found)
        return sums.out.to(shape.dtype).reshape(plan.num_tokens, -1)

    def _absorb(
        self,
        cascade: Cascade,
        q_nope_THP: torch.Tensor,
        q_rope_THR: torch.Tensor,
        up: UpProjection,
        pool: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[T, H, V] and the log-sum-exps [T, H]; ``pool`` is one layer's."""
        dtype = self.shape.dtype
        q_HTC = torch.bmm(q_nope_THP.to(dtype).transpose(0, 1), up.w_uk_HPC)
        q = torch.cat((q_HTC.transpose(0, 1), q_rope_THR.to(dtype)), dim=-1)
        out_1THC, lse = cascade.outputs_and_lse(q[None], pool[None], None)
        out_HTC = out_1THC[0].transpose(0, 1).to(dtype)
        return torch.bmm(out_HTC, up.w_uv_HCV).transpose(0, 1).float(), lse[0]

    def _expand(
        self,
        cascade: Cascade,
        q_nope_THP: torch.Tensor,
        q_rope_THR: torch.Tensor,
        up: UpProjection,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same; ``rows``: [n, C + R], of the pool."""
        shape = self.shape
        latent, k_rope = rows[:, : shape.kv_lora_rank], rows[:, shape.kv_lora_rank :]
        k_nope = torch.matmul(latent, up.w_uk_HPC.transpose(1, 2))  # [H, n, P]
        keys = torch.cat((k_nope, k_rope.expand(shape.num_heads, -1, -1)), dim=-1)
        values = torch.matmul(latent, up.w_uv_HCV)  # [H, n, V]
        q_THE = torch.cat((q_nope_THP, q_rope_THR), dim=-1).to(shape.dtype)
        q_HT1E = q_THE.transpose(0, 1).contiguous().unsqueeze(2)
        out, lse = cascade.outputs_and_lse(q_HT1E, keys, values)
        return out[:, :, 0].transpose(0, 1), lse[:, :, 0].transpose(0, 1)

    def _some(self, pieces: Pieces, step: Step) -> torch.Tensor | None:
        if pieces.num_tokens == step.num_tokens:
            return None
        return self._tensor(pieces.queries)

    def _tensor(self, array: I64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.shape.device)


class _Sums:
    """The merged results of the parts so far; ``out``: float32[T, H, V]."""

    def __init__(self, plan: MlaTorchPlan, shape: MlaShape) -> None:
        size = (plan.num_tokens, shape.num_heads)
        self._is_first = True
        self._is_whole = len(plan.parts) == 1
        if not self._is_whole:
            self.out = torch.zeros((*size, shape.v_dim), device=shape.device)
            self._lse = torch.full(size, -torch.inf, device=shape.device)

    def add(self, queries: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor) -> None:
        """What some queries got, or all of them where None."""
        if self._is_whole:
            self.out = out
            return
        if not self._is_first:
            outs = torch.stack((_rows(self.out, queries), out))
            out, lse = lse_merge(outs, torch.stack((_rows(self._lse, queries), lse)))
        if queries is None:
            self.out, self._lse = out, lse
        else:
            self.out.index_copy_(0, queries, out)
            self._lse.index_copy_(0, queries, lse)
        self._is_first = False


def _rows(tensor: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
    return tensor if queries is None else tensor.index_select(0, queries)


def expansion_batches(pieces: Pieces, most_slots: int) -> Iterator[tuple[Pieces, I64]]:
    """The pieces a few at a time, numbered within the slots that are to be expanded for them.

    Slots that several pieces of a batch have are expanded once. A causal piece stays whole.
    """
    waiting = [(*piece, True) for piece in pieces.causal.tolist()]
    for slot_start, num_slots, query_start, query_end in pieces.context.tolist():
        for at in range(0, num_slots, most_slots):
            length = min(most_slots, num_slots - at)
            waiting.append((slot_start + at, length, query_start, query_end, False))
    waiting.sort(key=lambda piece: piece[2])  # stable; nodes and those below them together
    while waiting:
        places: dict[tuple[int, int], int] = {}
        num_slots = taken = 0
        rows: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
        for slot_start, length, query_start, query_end, causal in waiting:
            run = (slot_start, length)
            if run not in places:
                if places and num_slots + length > most_slots:
                    break
                places[run] = num_slots
                num_slots += length
            rows[causal].append((places[run], length, query_start, query_end))
            taken += 1
        del waiting[:taken]
        context, causal_rows = i64_table(rows[False], 4), i64_table(rows[True], 4)
        batch = select_pieces(context, causal_rows, pieces.num_tokens)
        yield (
            Pieces(batch.context, batch.causal, pieces.queries[batch.queries]),
            slots_of(places),
        )
