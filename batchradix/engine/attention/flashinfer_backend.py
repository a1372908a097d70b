"""Attention over tree nodes through FlashInfer's paged and cascade wrappers, for GPUs of NVIDIA.

A `plain_pool` is a paged cache as it stands, with a page a slot: FlashInfer goes by strides. Once a
step, the wrapper of every level (`flashinfer_plan`) is given its page tables; in every layer each
attends, and what the queries got is merged by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchradix.engine.attention import plain_pool
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.flashinfer_module import (
    WORKSPACE_BYTES,
    PlanCopies,
    building_kernels,
    capability,
    for_device,
    import_flashinfer,
    missing_flashinfer,
)
from batchradix.engine.attention.flashinfer_plan import Level, plan_levels
from batchradix.engine.step import Step, empty_i64, i64_table
from batchradix.types import I64
from batchradix_kernels.kv_store import kv_store

# A level costs a call and a merge in every layer, some 20 µs, in which a GPU reads keys and values
# of thousands of slots: one that saves less goes into the lists of its queries. Not measured yet.
MIN_SAVED_SLOTS = 4096
MAX_LEVELS = 4
_HEAD_DIMS = (64, 128, 256)
_LAYOUT = "HND"  # [pages, key heads, 1, E], in any strides
_TILE_ROWS = 128  # the largest tile of queries of its kernels
_MERGE_ELEMENTS = 8192  # of a query's heads: more than that its merge has no threads for


@dataclass(frozen=True, slots=True)
class _Shared:
    """A planned wrapper, and which of T · K rows have something to merge; None for all."""

    wrapper: Any
    merges: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """``slots``: int32[T], where new keys and values go. Of wrappers, which hold the rest of the
    plan, either one that does all levels and their merging, or one each. They forget it when the
    backend plans again."""

    slots: torch.Tensor
    cascade: Any
    shared: tuple[_Shared, ...]
    own: Any


class FlashInferAttention:
    """Implements `AttentionBackend`. Making one builds FlashInfer's kernels the first time ever
    (minutes). Raises `OptionError` where that does not succeed."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self._flashinfer = import_flashinfer()
        self._is_hopper = capability(shape.device)[0] == 9
        self._workspace = torch.empty(
            _workspace_bytes(shape), dtype=torch.uint8, device=shape.device
        )
        self._wrappers: dict[tuple[str, int], Any] = {}
        self._planned: FlashInferPlan | None = None
        self._copies = PlanCopies(shape.device)
        self._build()

    @staticmethod
    def missing(shape: AttentionShape) -> str | None:
        """Why it does not serve, and what to do instead; None where it does."""
        if shape.pool_dtype != shape.dtype:
            return "it is given no keys and values in 8 bits (`kv_dtype` fp8); use triton or torch"
        if shape.peculiarities:
            return "it is given no sliding windows, capped scores or sinks; use torch"
        why = missing_flashinfer(shape.device, shape.dtype)
        if why is None and shape.head_dim not in _HEAD_DIMS:
            why = f"there is none for heads of {shape.head_dim}, only of 64, 128, 256; use triton"
        return why

    def allocate(self, num_slots: int) -> torch.Tensor:
        return plain_pool.allocate(self.shape, num_slots)

    def move(self, pool: torch.Tensor, moves: I64) -> None:
        plain_pool.move(pool, moves, triton=True)

    def poison(self, pool: torch.Tensor, slot_start: int, num_slots: int) -> None:
        plain_pool.poison(pool, slot_start, num_slots)

    def export(self, pool: torch.Tensor, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
        return plain_pool.export(pool, slots)

    def load(self, pool: torch.Tensor, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        plain_pool.load(pool, slot_start, k, v)

    def plan(self, step: Step) -> FlashInferPlan:
        """A plan, which holds until the next one is made."""
        self._copies.wait()
        *shared, own = _levels(step.context, step.causal, step.num_tokens)
        kernels = [self._kernel(level) for level in (*shared, own)]
        slots = self._tensor(step.slots.astype(np.int32))
        if shared and self._may_cascade(shared, kernels):
            plan = FlashInferPlan(slots, self._plan_cascade([*shared, own]), (), None)
        else:
            wrappers = [
                self._plan_level(place, level, kernel)
                for place, (level, kernel) in enumerate(zip((*shared, own), kernels, strict=True))
            ]
            merging = (
                _Shared(wrapper, self._merges(level))
                for wrapper, level in zip(wrappers, shared, strict=False)
            )
            plan = FlashInferPlan(slots, None, tuple(merging), wrappers[-1])
        self._copies.note()
        self._planned = plan
        return plan

    def run(
        self,
        layer: int,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        pool: torch.Tensor,
        plan: FlashInferPlan,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks_H is None
        assert plan is self._planned, "the wrappers hold a later plan"
        kv_store(k_TKE, v_TKE, plan.slots, pool[layer])
        q_THE = q_THE.to(self.shape.dtype)
        cache = _paged(pool[layer])
        if plan.cascade is not None:
            out = plan.cascade.run(q_THE, cache)
        elif not plan.shared:
            out = plan.own.run(q_THE, cache)
        else:
            out, lse = plan.own.run(q_THE, cache, return_lse=True)
            for level in plan.shared:
                part, part_lse = level.wrapper.run(q_THE, cache, return_lse=True)
                self._flashinfer.merge_state_in_place(
                    *self._rows(out, lse), *self._rows(part, part_lse), mask=level.merges
                )
        attended: torch.Tensor = out.view(len(q_THE), -1)
        return attended

    def _kernel(self, level: Level) -> str:
        """On Hopper, the kernel that FlashInfer prefers there (``fa3``) has tiles of 128 queries of
        one head and splits no keys; for fewer queries the older one takes the heads of a key head
        together, in tiles from 16 rows on, and splits long lists."""
        few = self._is_hopper and level.mean_queries < _TILE_ROWS
        return "fa2" if few else "auto"

    def _may_cascade(self, shared: list[Level], kernels: list[str]) -> bool:
        """FlashInfer's cascade takes one kernel for all levels and merges all queries."""
        return (
            all(level.is_full for level in shared)
            and all(kernel == "auto" for kernel in kernels)
            and self.shape.num_heads * self.shape.head_dim <= _MERGE_ELEMENTS
        )

    def _plan_level(self, place: int, level: Level, kernel: str) -> Any:
        """Wrappers own buffers of some 8 MB on either side, so they are kept, by their place."""
        key = (kernel, place)
        if key not in self._wrappers:
            self._wrappers[key] = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, _LAYOUT, backend=kernel
            )
        wrapper, tables = self._wrappers[key], self._tables(level)
        wrapper.plan(*tables, *self._sizes(), causal=level.causal, **self._numbers())
        return wrapper

    def _plan_cascade(self, levels: list[Level]) -> Any:
        key = ("cascade", len(levels))
        if key not in self._wrappers:
            self._wrappers[key] = self._flashinfer.MultiLevelCascadeAttentionWrapper(
                len(levels), self._workspace, _LAYOUT
            )
        tables = zip(*map(self._tables, levels), strict=True)
        wrapper, causal = self._wrappers[key], levels[-1].causal
        wrapper.plan(*map(list, tables), *self._sizes(), causal=causal, **self._numbers())
        return wrapper

    def _sizes(self) -> tuple[int, int, int, int]:
        shape = self.shape
        return shape.num_heads, shape.num_kv_heads, shape.head_dim, 1

    def _numbers(self) -> dict[str, Any]:
        shape = self.shape
        return {"sm_scale": shape.scale, "q_data_type": shape.dtype, "kv_data_type": shape.dtype}

    def _merges(self, level: Level) -> torch.Tensor | None:
        if level.is_full:
            return None
        return self._tensor(np.repeat(level.seen, self.shape.num_kv_heads))

    def _rows(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H, E] and [T, H] as T · K rows: a merge has a thread for each part of a row."""
        heads = (-1, self.shape.num_heads // self.shape.num_kv_heads)
        return out.view(*heads, self.shape.head_dim), lse.view(heads)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return for_device(array, self.shape.device).to(self.shape.device, non_blocking=True)

    def _tables(self, level: Level) -> list[torch.Tensor]:
        tables = (level.qo_indptr, level.kv_indptr, level.kv_indices, level.last_page_len)
        return [for_device(table, self.shape.device) for table in tables]

    def _build(self) -> None:
        """Attends once in every way that steps may, and merges."""
        shape = self.shape
        [own] = _levels(empty_i64(0, 4), i64_table([(0, 1, 0, 1)], 4), 1)
        cache = _paged(plain_pool.allocate(replace(shape, num_layers=1), 1).zero_()[0])
        q = torch.zeros(
            (1, shape.num_heads, shape.head_dim), dtype=shape.dtype, device=shape.device
        )
        with building_kernels():
            for kernel in ("fa2", "auto") if self._is_hopper else ("auto",):
                wrapper = self._plan_level(0, own, kernel)
                out, lse = wrapper.run(q, cache, return_lse=True)
                merged = self._rows(out, lse)
                self._flashinfer.merge_state_in_place(*merged, *merged, mask=None)


def _levels(context: I64, causal: I64, num_queries: int) -> tuple[Level, ...]:
    limits = {"max_levels": MAX_LEVELS, "min_saved_slots": MIN_SAVED_SLOTS}
    return plan_levels(context, causal, num_queries, **limits)


def _paged(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer's pool [2, K, slots, E] as pages of a slot, [slots, K, 1, E]."""
    keys, values = pool.transpose(1, 2).unsqueeze(3)
    return keys, values


def _workspace_bytes(shape: AttentionShape) -> int:
    """Room for the parts of lists that are split, in float32: as many tiles as run at once, two a
    processor for every query head of a key head."""
    if shape.device.type != "cuda":
        return WORKSPACE_BYTES
    num_processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
    num_tiles = 2 * num_processors * shape.num_heads // shape.num_kv_heads
    tile_bytes = 4 * _TILE_ROWS * (shape.head_dim + 1)
    return max(WORKSPACE_BYTES, num_tiles * tile_bytes + (1 << 20))
