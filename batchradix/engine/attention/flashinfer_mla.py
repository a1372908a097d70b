"""Latent attention over tree nodes through FlashInfer's MLA wrapper, for GPUs of NVIDIA.

All pieces are attended to absorbed: one key head whose keys are latent and rope key and whose
values are the latents. The pool of `mla_pool` is two paged caches as it stands, with a page a slot.
Levels are those of `flashinfer_plan`; at one that not all queries have, those that do are gathered,
since the older of FlashInfer's two kernels must not get a list without slots. What the levels give
is merged in the latent space.

Legend: T queries, H heads, C latent, R rope, P nope, V value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from batchradix.engine.attention import mla_pool
from batchradix.engine.attention.flashinfer_module import (
    WORKSPACE_BYTES,
    PlanCopies,
    building_kernels,
    for_device,
    import_flashinfer,
    missing_flashinfer,
)
from batchradix.engine.attention.flashinfer_plan import Level, plan_levels
from batchradix.engine.attention.mla_base import MlaShape, UpProjection
from batchradix.engine.step import Step, empty_i64, i64_table
from batchradix.errors import OptionError
from batchradix.types import I64

# A level costs a call, a gather and a merge of C numbers a head; a slot is 1 KB. Not measured yet.
MIN_SAVED_SLOTS = 8192
MAX_LEVELS = 3
_SIZES = (512, 64)  # of latent and rope key
_NUM_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)  # with others a tile's causal end is rounded down
_MAX_TILES = 16000  # beyond 16384 tiles and splits the wrapper writes where it has no room


@dataclass(frozen=True, slots=True)
class _Planned:
    """``queries``: int64 on the device, those of the level, None for all."""

    wrapper: Any
    queries: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class FlashInferMlaPlan:
    """``slots``: int64[T] on the device, where the step's own tokens go. The wrappers, which hold
    the rest of the plan, forget it when the backend plans again."""

    slots: torch.Tensor
    shared: tuple[_Planned, ...]
    own: Any


class FlashInferMla:
    """Implements `MlaBackend`. Making one builds FlashInfer's kernels the first time ever
    (minutes). Raises `OptionError` where that does not succeed."""

    def __init__(self, shape: MlaShape) -> None:
        self.shape = shape
        self._flashinfer = import_flashinfer()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._wrappers: list[Any] = []
        self._planned: FlashInferMlaPlan | None = None
        self._copies = PlanCopies(shape.device)
        self._build()

    @staticmethod
    def missing(shape: MlaShape) -> str | None:
        """Why it does not serve, and what to do instead; None where it does."""
        why = missing_flashinfer(shape.device, shape.dtype)
        if why is None and (shape.kv_lora_rank, shape.rope_dim) != _SIZES:
            why = (
                f"there is none for latents of {shape.kv_lora_rank} and rope keys of "
                f"{shape.rope_dim}, only of 512 and 64; use torch"
            )
        if why is None and shape.num_heads not in _NUM_HEADS:
            why = f"there is none for {shape.num_heads} heads, only for 1, 2, 4 … 128; use torch"
        return why

    def allocate(self, num_slots: int) -> torch.Tensor:
        return mla_pool.allocate(self.shape, num_slots)

    def move(self, pool: torch.Tensor, moves: I64) -> None:
        mla_pool.move(pool, moves)

    def poison(self, pool: torch.Tensor, slot_start: int, num_slots: int) -> None:
        mla_pool.poison(pool, slot_start, num_slots)

    def export(self, pool: torch.Tensor, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_pool.export(pool, slots, self.shape.kv_lora_rank)

    def load(
        self, pool: torch.Tensor, slot_start: int, k_L1nC: torch.Tensor, v_L1nR: torch.Tensor
    ) -> None:
        mla_pool.load(pool, slot_start, k_L1nC, v_L1nR)

    def plan(self, step: Step) -> FlashInferMlaPlan:
        """A plan, which holds until the next one is made."""
        self._copies.wait()
        *shared, own = _levels(step.context, step.causal, step.num_tokens)
        plan = FlashInferMlaPlan(
            slots=self._tensor(step.slots),
            shared=tuple(
                _Planned(self._plan_level(place, level), self._queries(level))
                for place, level in enumerate(shared, start=1)
            ),
            own=self._plan_level(0, own),
        )
        self._copies.note()
        self._planned = plan
        return plan

    def run(
        self,
        layer: int,
        q_nope_THP: torch.Tensor,
        q_rope_THR: torch.Tensor,
        latent_TC: torch.Tensor,
        k_rope_TR: torch.Tensor,
        up: UpProjection,
        pool: torch.Tensor,
        plan: FlashInferMlaPlan,
    ) -> torch.Tensor:
        assert plan is self._planned, "the wrappers hold a later plan"
        dtype = self.shape.dtype
        mla_pool.write(pool, layer, plan.slots, latent_TC, k_rope_TR)
        caches = _paged(pool[layer], self.shape.kv_lora_rank)
        q_HTC = torch.bmm(q_nope_THP.to(dtype).transpose(0, 1), up.w_uk_HPC)
        q = (q_HTC.transpose(0, 1).contiguous(), q_rope_THR.to(dtype).contiguous())
        out_THC, lse = plan.own.run(*q, *caches, return_lse=True)
        for level in plan.shared:
            if level.queries is None:
                self._merge((out_THC, lse), level.wrapper.run(*q, *caches, return_lse=True))
                continue
            some = [side.index_select(0, level.queries) for side in (*q, out_THC, lse)]
            found = level.wrapper.run(*some[:2], *caches, return_lse=True)
            self._merge((some[2], some[3]), found)
            out_THC.index_copy_(0, level.queries, some[2])
            lse.index_copy_(0, level.queries, some[3])
        out_HTV = torch.bmm(out_THC.transpose(0, 1), up.w_uv_HCV)
        return out_HTV.transpose(0, 1).reshape(len(plan.slots), -1)

    def _merge(self, sums: Sequence[torch.Tensor], more: Sequence[torch.Tensor]) -> None:
        """Outputs [T, H, C] and log-sum-exps [T, H]; a merge has threads for a few heads only, so
        each is a row of its own."""
        (out, lse), (part, part_lse) = sums, more
        size = (-1, 1, out.shape[2])
        self._flashinfer.merge_state_in_place(
            out.view(size), lse.view(-1, 1), part.view(size), part_lse.view(-1, 1)
        )

    def _plan_level(self, place: int, level: Level) -> Any:
        """Wrappers own buffers of 8 MB on either side, so they are kept, by their place."""
        shape = self.shape
        level = _without_empty(level)
        counts = np.diff(level.kv_indptr)
        rows = np.diff(level.qo_indptr) * shape.num_heads
        if (-(-rows // (128 if rows.mean() > 64 else 64))).sum() > _MAX_TILES:
            raise OptionError(
                "`prefill_tokens` is more than FlashInfer has room for with this model; lower it, "
                "or use `attention` torch"
            )
        while len(self._wrappers) <= place:
            self._wrappers.append(self._flashinfer.BatchMLAPagedAttentionWrapper(self._workspace))
        tables = (level.qo_indptr, level.kv_indptr, level.kv_indices, counts.astype(np.int32))
        self._wrappers[place].plan(
            *(for_device(table, shape.device) for table in tables),
            *(shape.num_heads, shape.kv_lora_rank, shape.rope_dim, 1),
            *(level.causal, shape.scale, shape.dtype, shape.dtype),
        )
        return self._wrappers[place]

    def _queries(self, level: Level) -> torch.Tensor | None:
        return None if level.is_full else self._tensor(np.flatnonzero(level.seen))

    def _tensor(self, array: I64) -> torch.Tensor:
        return for_device(array, self.shape.device).to(self.shape.device, non_blocking=True)

    def _build(self) -> None:
        """Attends once, and merges."""
        shape = self.shape
        pool = mla_pool.allocate(replace(shape, num_layers=1), 1).zero_()
        q_latent = pool.new_zeros((1, shape.num_heads, shape.kv_lora_rank))
        q_rope = pool.new_zeros((1, shape.num_heads, shape.rope_dim))
        [own] = _levels(empty_i64(0, 4), i64_table([(0, 1, 0, 1)], 4), 1)
        with building_kernels():
            wrapper = self._plan_level(0, own)
            caches = _paged(pool[0], shape.kv_lora_rank)
            found = wrapper.run(q_latent, q_rope, *caches, return_lse=True)
            self._merge(found, found)


def _levels(context: I64, causal: I64, num_queries: int) -> tuple[Level, ...]:
    limits = {"max_levels": MAX_LEVELS, "min_saved_slots": MIN_SAVED_SLOTS}
    return plan_levels(context, causal, num_queries, **limits)


def _without_empty(level: Level) -> Level:
    """The level of the queries that have slots alone, numbered anew."""
    if level.is_full:
        return level
    kept = level.last_page_len > 0
    num_queries = np.diff(level.qo_indptr)[kept]
    return replace(
        level,
        qo_indptr=np.concatenate(([0], np.cumsum(num_queries))).astype(np.int32),
        kv_indptr=np.concatenate(([0], level.kv_indptr[1:][kept])).astype(np.int32),
        last_page_len=level.last_page_len[kept],
        seen=level.seen[level.seen],
    )


def _paged(rows: torch.Tensor, kv_lora_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's pool [slots, C + R] as pages of a slot: latents [slots, 1, C], rope keys
    [slots, 1, R]."""
    pages = rows.unsqueeze(1)
    return pages[..., :kv_lora_rank], pages[..., kv_lora_rank:]
