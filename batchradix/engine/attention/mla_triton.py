"""Latent attention over tree nodes through the Triton kernels of the kernel library.

Pieces attended to absorbed are read from the pool itself, by all heads together. The others are
attended to head by head, over keys and values made of gathered latents, a bounded number of slots
at a time. Where a step has both, what the absorbed ones give goes through ``w_uv`` and is then
merged as a part beside those of the others.

For GPUs; on the CPU as `batchradix.engine.attention.triton_backend` says.

Legend: T queries, H heads, C latent, R rope, P nope, V value, n slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchradix.engine.attention import mla_pool
from batchradix.engine.attention.mla_base import (
    Form,
    MlaShape,
    Pieces,
    UpProjection,
    pieces_by_form,
)
from batchradix.engine.attention.mla_torch import expansion_batches
from batchradix.engine.step import Step, i64_table
from batchradix.types import I64
from batchradix_kernels.latent_store import latent_store

if TYPE_CHECKING:
    from batchradix_kernels.mla_attention.triton import LatentPlan

MAX_EXPANDED = 1 << 27  # elements of keys and values that are made at a time


@dataclass(frozen=True, slots=True)
class MlaTritonPlan:
    """``slots``: int32[T] on the device, where the step's own tokens go. ``absorbed`` is of the
    queries ``absorbed_queries``, int64 on the device (all where None), ``expanded`` of all of the
    step's, with a part for each absorbed one. ``chunks``: int32[n] on the device, the slots to
    expand for each chunk of ``expanded``."""

    num_tokens: int
    slots: torch.Tensor
    absorbed: LatentPlan | None
    absorbed_queries: torch.Tensor | None
    expanded: LatentPlan | None
    chunks: tuple[torch.Tensor, ...]


class TritonMla:
    """Implements `MlaBackend`; ``form`` takes one form for all pieces, for tests."""

    def __init__(
        self, shape: MlaShape, form: Form | None = None, max_expanded: int = MAX_EXPANDED
    ) -> None:
        # Not everywhere where batchradix runs is there a Triton to import.
        from batchradix_kernels.mla_attention.triton import TritonLatentAttention

        self.shape = shape
        self._form = form
        widths = shape.nope_dim + shape.rope_dim + shape.v_dim
        self._slots_at_once = max(1, max_expanded // (shape.num_heads * widths))
        self._absorbed, self._expanded = (
            TritonLatentAttention(
                absorbed=absorbed,
                num_heads=shape.num_heads,
                key_dim=shape.kv_lora_rank if absorbed else shape.nope_dim,
                rope_dim=shape.rope_dim,
                value_dim=shape.kv_lora_rank if absorbed else shape.v_dim,
                scale=shape.scale,
                dtype=shape.dtype,
                device=shape.device,
            )
            for absorbed in (True, False)
        )

    def allocate(self, num_slots: int) -> torch.Tensor:
        return mla_pool.allocate(self.shape, num_slots)

    def move(self, pool: torch.Tensor, moves: I64) -> None:
        mla_pool.move(pool, moves)

    def poison(self, pool: torch.Tensor, slot_start: int, num_slots: int) -> None:
        mla_pool.poison(pool, slot_start, num_slots)

    def export(self, pool: torch.Tensor, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_pool.export(pool, slots, self.shape.kv_lora_rank)

    def load(self, pool: torch.Tensor, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        mla_pool.load(pool, slot_start, k, v)

    def plan(self, step: Step) -> MlaTritonPlan:
        absorbed, expanded = pieces_by_form(step, self.shape, self._form)
        absorbed_plan, expanded_plan, queries = None, None, None
        chunks: list[I64] = []
        if absorbed.num_tokens:
            absorbed_plan = self._absorbed.plan(
                absorbed.context, absorbed.causal, absorbed.num_tokens
            )
            if absorbed.num_tokens < step.num_tokens:
                queries = torch.from_numpy(absorbed.queries).to(self.shape.device)
        if expanded.num_tokens:
            context, causal, chunks = self._in_chunks(expanded)
            expanded_plan = self._expanded.plan(
                context,
                causal,
                step.num_tokens,
                chunk_ends=np.cumsum([len(slots) for slots in chunks]).tolist(),
                extra_queries=absorbed.queries,
            )
        slots = np.concatenate([step.slots, *chunks]).astype(np.int32)
        there = torch.from_numpy(slots).to(self.shape.device)
        own, *of_chunks = torch.split(there, [step.num_tokens, *map(len, chunks)])
        return MlaTritonPlan(
            num_tokens=step.num_tokens,
            slots=own,
            absorbed=absorbed_plan,
            absorbed_queries=queries,
            expanded=expanded_plan,
            chunks=tuple(of_chunks),
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
        plan: MlaTritonPlan,
    ) -> torch.Tensor:
        shape = self.shape
        latent_store(latent_TC, k_rope_TR, plan.slots, pool[layer])
        q_nope, q_rope = q_nope_THP.to(shape.dtype), q_rope_THR.to(shape.dtype)
        out_HTV = None
        if plan.absorbed is not None:
            out_HTV, lse_TH = self._absorb(plan, plan.absorbed, q_nope, q_rope, up, pool[layer])
        if plan.expanded is None:
            assert out_HTV is not None
            return out_HTV.transpose(0, 1).reshape(plan.num_tokens, -1)
        if out_HTV is not None:
            plan.expanded.extra.copy_(out_HTV.transpose(0, 1))
            plan.expanded.extra_lse.copy_(lse_TH)
        for chunk, slots in enumerate(plan.chunks):
            rows_nE = pool[layer].index_select(0, slots)
            latents, ropes = rows_nE[:, : shape.kv_lora_rank], rows_nE[:, shape.kv_lora_rank :]
            keys_HnP = torch.matmul(latents, up.w_uk_HPC.transpose(1, 2))
            values_HnV = torch.matmul(latents, up.w_uv_HCV)
            self._expanded.attend(
                plan.expanded, q_nope, q_rope, keys_HnP, ropes, values_HnV, chunk=chunk
            )
        size = (plan.num_tokens, shape.num_heads, shape.v_dim)
        out = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self._expanded.merge(plan.expanded, out)
        return out.view(plan.num_tokens, -1)

    def _absorb(
        self,
        plan: MlaTritonPlan,
        absorbed: LatentPlan,
        q_nope_THP: torch.Tensor,
        q_rope_THR: torch.Tensor,
        up: UpProjection,
        pool: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[H, T, V] of the absorbed queries, and the log-sum-exps float32[T, H]; ``pool`` is one
        layer's."""
        shape = self.shape
        if plan.absorbed_queries is not None:
            q_nope_THP = q_nope_THP.index_select(0, plan.absorbed_queries)
            q_rope_THR = q_rope_THR.index_select(0, plan.absorbed_queries)
        q_HTC = torch.bmm(q_nope_THP.transpose(0, 1), up.w_uk_HPC)
        latents, ropes = pool[:, : shape.kv_lora_rank], pool[:, shape.kv_lora_rank :]
        self._absorbed.attend(absorbed, q_HTC.transpose(0, 1), q_rope_THR, latents[None], ropes)
        size = (len(q_nope_THP), shape.num_heads, shape.kv_lora_rank)
        out_THC = torch.empty(size, dtype=shape.dtype, device=shape.device)
        lse_TH = torch.empty(size[:2], dtype=torch.float32, device=shape.device)
        self._absorbed.merge(absorbed, out_THC, lse_TH)
        return torch.bmm(out_THC.transpose(0, 1), up.w_uv_HCV), lse_TH

    def _in_chunks(self, pieces: Pieces) -> tuple[I64, I64, list[I64]]:
        """The pieces, context and causal, with the step's numbers of queries and with places in
        all chunks one after the other; and the slots of each chunk."""
        context: list[tuple[int, ...]] = []
        causal: list[tuple[int, ...]] = []
        chunks, start = [], 0
        for batch, slots in expansion_batches(pieces, self._slots_at_once):
            context += _placed(batch.context, start, batch.queries)
            causal += _placed(batch.causal, start, batch.queries)
            chunks.append(slots)
            start += len(slots)
        return i64_table(context, 4), i64_table(causal, 4), chunks


def _placed(pieces: I64, start: int, queries: I64) -> Iterator[tuple[int, ...]]:
    for place, num_slots, first, end in pieces.tolist():
        yield start + place, num_slots, int(queries[first]), int(queries[end - 1]) + 1
