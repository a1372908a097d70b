"""Attention over all pieces of a step in Triton: four kernels a layer, whatever the tree.

One writes the new keys and values, two attend, for low and for high tiles, and one merges. A tile
stacks query rows (the queries of a piece times the query heads of a key head), so the keys of a
shared node are multiplied as matrices with all rows below it. A program walks one item of
`cascade_plan`: a tile over a run of slots, with an online softmax (Milakov and Gimelshein 2018),
causal or not, and writes a normalised partial result with its log-sum-exp. The parts of each
query are then merged (`lse_merge`).

Numerics: queries, keys and values are multiplied in the model's dtype (float32 without TF32) and
summed in float32; softmax, log-sum-exps and merging are float32, in base two. Softmax weights are
rounded to the model's dtype for the product with the values, their sum is not. Keys and values
stored in 8 bits are widened to it, which is exact. A query with a NaN among its scores or values
gets NaN; so may, in a causal piece, a query before it in its tile, and with a window one behind it.

Legend: T queries, H query heads, K key heads, G = H / K, E head dimension, S slots, M rows and N
slots of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from batchradix_kernels.kv_store.triton import kv_store_triton
from batchradix_kernels.lse_merge.triton import merge_parts_triton
from batchradix_kernels.tree_attention.cascade_plan import (
    I32,
    I64,
    ITEM_FIELDS,
    CascadePlan,
    plan_cascade,
)
from batchradix_kernels.tree_attention.tiles import NAMES, Tile, fit_choices, tile_choices

__all__ = ["TritonTreeAttention", "TritonTreePlan", "attend_items_kernel", "device_tiles"]

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
DOUBLE_LOG2_E = tl.constexpr(2 * LOG2_E)
PROGRAMS_PER_PROCESSOR = 4
INTERPRETER_PROGRAMS = 8
LEAST_ROUNDED = 64
ALIGNMENT = 4  # int32 numbers, so that each array of an upload begins at 16 bytes


@triton.jit
def _factor(x, DTYPE: tl.constexpr):
    """``x`` in the dtype of that name, in which it is multiplied."""
    if DTYPE == "bf16":
        x = x.to(tl.bfloat16)
    elif DTYPE == "fp16":
        x = x.to(tl.float16)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def _attend_tile(
    q_ME,
    top_M,
    total_M,
    sums_ME,
    keys,
    values,
    pages,
    first,
    start,
    end,
    low_M,
    seen_M,
    scale_log2,
    cap_log2,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes positions ``[start, start + BLOCK_N)`` into the running softmax; ``MASKED`` where
    some lie behind ``end`` or are not seen by each row, ``[low, seen)`` or without a window all
    below ``seen``."""
    n = start + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    if PAGE_SIZE == 0:
        slot_N = first + n
    elif MASKED:
        page_N = tl.load(pages + first + n // PAGE_SIZE, mask=n < end, other=0)
        slot_N = page_N * PAGE_SIZE + n % PAGE_SIZE
    else:
        slot_N = tl.load(pages + first + n // PAGE_SIZE) * PAGE_SIZE + n % PAGE_SIZE
    at_NE = slot_N.to(tl.int64)[:, None] * HEAD_DIM + e[None, :]
    if MASKED:
        mask_NE = (n < end)[:, None] & (e < HEAD_DIM)[None, :]
        k_NE = tl.load(keys + at_NE, mask=mask_NE, other=0.0)
        v_NE = tl.load(values + at_NE, mask=mask_NE, other=0.0)
    elif BLOCK_E > HEAD_DIM:
        k_NE = tl.load(keys + at_NE, mask=(e < HEAD_DIM)[None, :], other=0.0)
        v_NE = tl.load(values + at_NE, mask=(e < HEAD_DIM)[None, :], other=0.0)
    else:
        k_NE = tl.load(keys + at_NE)
        v_NE = tl.load(values + at_NE)
    k_NE, v_NE = _factor(k_NE, DTYPE), _factor(v_NE, DTYPE)
    scores_MN = tl.dot(q_ME, tl.trans(k_NE), input_precision=PRECISION) * scale_log2
    if CAPPED:
        power_MN = tl.exp2(tl.abs(scores_MN) * (DOUBLE_LOG2_E / -cap_log2))
        size_MN = cap_log2 * (1.0 - power_MN) / (1.0 + power_MN)
        scores_MN = tl.where(scores_MN < 0.0, -size_MN, size_MN)
    if MASKED:
        seen_MN = n[None, :] < seen_M[:, None]
        if WINDOWED:
            seen_MN &= n[None, :] >= low_M[:, None]
        scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
    higher_M = tl.maximum(top_M, tl.max(scores_MN, 1))
    base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)  # -inf - -inf is NaN
    weights_MN = tl.exp2(scores_MN - base_M[:, None])
    kept_M = tl.exp2(top_M - base_M)
    total_M = total_M * kept_M + tl.sum(weights_MN, 1)
    sums_ME = sums_ME * kept_M[:, None]
    sums_ME += tl.dot(_factor(weights_MN, DTYPE), v_NE, input_precision=PRECISION)
    return higher_M, total_M, sums_ME


@triton.jit
def attend_items_kernel(
    q,
    keys,
    values,
    items,
    pages,
    first_seen,
    partial,
    partial_lse,
    q_token_stride,
    q_head_stride,
    kv_head_stride,
    scale_log2,
    cap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Program (i, h): item i for key head h. An item without queries does nothing."""
    item = items + tl.program_id(0) * 8
    kv_head = tl.program_id(1)
    first = tl.load(item)
    start = tl.load(item + 1)
    end = tl.load(item + 2)
    query_start = tl.load(item + 3)
    num_queries = tl.load(item + 4)
    first_part = tl.load(item + 5)
    limit = tl.load(item + 6)
    if num_queries == 0:
        return

    query_M = tl.arange(0, BLOCK_M) // GROUP
    head_M = kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    e = tl.arange(0, BLOCK_E)
    mask_ME = (query_M < num_queries)[:, None] & (e < HEAD_DIM)[None, :]
    row_M = (query_start + query_M).to(tl.int64) * q_token_stride + head_M * q_head_stride
    q_ME = tl.load(q + row_M[:, None] + e[None, :], mask=mask_ME, other=0.0)
    q_ME = _factor(q_ME, DTYPE)
    keys += kv_head.to(tl.int64) * kv_head_stride
    values += kv_head.to(tl.int64) * kv_head_stride

    seen_M = tl.minimum(limit + query_M, end)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    sums_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    whole = tl.maximum(tl.minimum(limit, end) - start, 0)  # seen by every row
    edge = start + whole // BLOCK_N * BLOCK_N
    low_M = seen_M
    inner = start
    if WINDOWED:
        low_M = tl.load(first_seen + query_start + query_M, mask=query_M < num_queries, other=0)
        low_M = tl.where(query_M < num_queries, low_M - tl.load(item + 7), 0)
        hidden = tl.maximum(tl.max(low_M, 0) - start, 0)  # from some row
        inner = tl.minimum(start + tl.cdiv(hidden, BLOCK_N) * BLOCK_N, edge)
        for n in range(start, inner, BLOCK_N):
            top_M, total_M, sums_ME = _attend_tile(
                q_ME, top_M, total_M, sums_ME, keys, values, pages, first, n, end, low_M, seen_M,
                scale_log2, cap_log2, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_E, DTYPE, PRECISION,
                WINDOWED, CAPPED, True,
            )  # fmt: skip
    for n in range(inner, edge, BLOCK_N):
        top_M, total_M, sums_ME = _attend_tile(
            q_ME, top_M, total_M, sums_ME, keys, values, pages, first, n, end, low_M, seen_M,
            scale_log2, cap_log2, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_E, DTYPE, PRECISION,
            WINDOWED, CAPPED, False,
        )  # fmt: skip
    for n in range(edge, end, BLOCK_N):
        top_M, total_M, sums_ME = _attend_tile(
            q_ME, top_M, total_M, sums_ME, keys, values, pages, first, n, end, low_M, seen_M,
            scale_log2, cap_log2, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_E, DTYPE, PRECISION,
            WINDOWED, CAPPED, True,
        )  # fmt: skip

    divisor_M = tl.where(total_M == 0.0, 1.0, total_M)
    place_M = (first_part + query_M).to(tl.int64) * (GROUP * tl.num_programs(1)) + head_M
    place_ME = place_M[:, None] * HEAD_DIM + e[None, :]
    tl.store(partial + place_ME, sums_ME / divisor_M[:, None], mask=mask_ME)
    lse_M = (top_M + tl.log2(divisor_M)) * LN_2
    tl.store(partial_lse + place_M, lse_M, mask=query_M < num_queries)


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """How much a plan on the device has room for; ``num_items``: of each height of tile;
    ``is_windowed``: whether queries have windows."""

    num_tokens: int
    num_pages: int
    num_items: tuple[int, ...]
    num_parts: int
    is_windowed: bool

    def rounded(self, num_tokens: int) -> PlanSizes:
        """As much or more, for so many tokens, of sizes that many steps have in common."""
        return PlanSizes(
            num_tokens,
            _power_of_2(self.num_pages),
            tuple(map(_power_of_2, self.num_items)),
            _power_of_2(self.num_parts),
            self.is_windowed,
        )


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """A step's plan on the host; see `TritonTreeAttention.plan` for what it was made of."""

    slots: I32
    pages: I32
    page_size: int
    cascade: CascadePlan

    @property
    def sizes(self) -> PlanSizes:
        cascade = self.cascade
        return PlanSizes(
            num_tokens=len(self.slots),
            num_pages=len(self.pages),
            num_items=tuple(map(len, cascade.items)),
            num_parts=cascade.num_parts,
            is_windowed=len(cascade.first_seen) > 0,
        )


@dataclass(frozen=True, slots=True)
class TritonTreePlan:
    """A step's items on the device, with room for its parts; all int32 arrays are views of
    ``packed``, which comes from the host in one copy."""

    num_tokens: int
    page_size: int
    packed: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor
    items: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    parts: torch.Tensor
    first_seen: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor


class TritonTreeAttention:
    """Plans once a step, runs once a layer.

    ``dtype`` (float32, float16 or bfloat16) is that of products and output, ``kv_dtype`` (the
    same unless it is given: `float8.FLOAT8`) that of the pool; ``scale`` multiplies the scores,
    which with a ``softcap`` then become ``softcap * tanh(score / softcap)``. A pool is
    [layers, 2, K, S, E], contiguous. ``tiles``: one of each of `device_tiles`, the first ones
    unless they are given.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        tiles: Sequence[Tile] | None = None,
        softcap: float | None = None,
    ) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._scale = scale
        self._softcap = softcap
        self._dtype = dtype
        self._kv_dtype = kv_dtype or dtype
        self._device = device
        choices = device_tiles(head_dim, self._group, dtype, device, kv_dtype)
        self._tiles = tuple(tiles or (each[0] for each in choices))
        self._num_programs = _num_programs(device)
        self._shared_room: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by parts

    def plan(
        self,
        slots: I64,
        context: I64,
        causal: I64,
        *,
        pages: I32 | None = None,
        page_size: int = 0,
        window: int | None = None,
    ) -> TritonTreePlan:
        """``slots``: int64[T], where each query's key and value go; ``context``, ``causal``:
        pieces as in `plan_cascade`, which begin at a slot. With ``pages``, tables of page numbers
        one after the other, they begin at a place in it instead, where position ``i`` lies in
        page ``pages[first + i // page_size]``. What a table holds behind a piece is never read.
        With a ``window`` queries see the last so many of their slots.
        """
        layout = self.lay_out(
            slots, context, causal, pages=pages, page_size=page_size, window=window
        )
        plan = self.empty_plan(layout.sizes, layout.page_size)
        self.fill(plan, layout)
        return plan

    def lay_out(
        self,
        slots: I64,
        context: I64,
        causal: I64,
        *,
        pages: I32 | None = None,
        page_size: int = 0,
        window: int | None = None,
    ) -> TreeLayout:
        """What `plan` takes, as far as the host gets with it."""
        cascade = plan_cascade(
            context,
            causal,
            len(slots),
            group=self._group,
            num_kv_heads=self._num_kv_heads,
            tile_rows=[tile.rows for tile in self._tiles],
            num_programs=self._num_programs,
            window=window,
        )
        table = np.zeros(0, dtype=np.int32) if pages is None else pages
        return TreeLayout(slots.astype(np.int32), table, 0 if pages is None else page_size, cascade)

    def empty_plan(
        self, sizes: PlanSizes, page_size: int = 0, *, shared: bool = False
    ) -> TritonTreePlan:
        """A plan to be filled, also again and again, with layouts of at most these sizes.

        ``shared``: plans with room for equally many parts keep them in the same place, so that
        they have to run one after the other.
        """
        shapes = (
            (sizes.num_tokens,),
            (sizes.num_pages,),
            (sizes.num_tokens + 1,),
            (sizes.num_parts,),
            (sizes.num_tokens if sizes.is_windowed else 0,),
            *((num_items, ITEM_FIELDS) for num_items in sizes.num_items),
        )
        starts = np.cumsum([0, *(_aligned(math.prod(shape)) for shape in shapes)]).tolist()
        packed = torch.empty(starts[-1], dtype=torch.int32, device=self._device)
        slots, pages, offsets, parts, first_seen, *items = (
            packed[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(starts, shapes, strict=False)
        )
        room = self._shared_room.get(sizes.num_parts) if shared else None
        if room is None:
            size = (sizes.num_parts, self._num_heads, self._head_dim)
            room = (
                torch.empty(size, dtype=torch.float32, device=self._device),
                torch.empty(size[:2], dtype=torch.float32, device=self._device),
            )
        if shared:
            self._shared_room[sizes.num_parts] = room
        return TritonTreePlan(
            num_tokens=sizes.num_tokens,
            page_size=page_size,
            packed=packed,
            slots=slots,
            pages=pages,
            items=tuple(items),
            offsets=offsets,
            parts=parts,
            first_seen=first_seen,
            partial=room[0],
            partial_lse=room[1],
        )

    def fill(self, plan: TritonTreePlan, layout: TreeLayout) -> None:
        """Puts a step's layout in the place of the one before. Tokens that the plan has beyond it
        write nothing and get zeros, items beyond it do nothing."""
        cascade = layout.cascade
        filled = (
            (plan.slots, layout.slots, -1),
            (plan.pages, layout.pages, 0),
            (plan.offsets, cascade.offsets, cascade.num_parts),
            (plan.parts, cascade.parts, 0),
            (plan.first_seen, cascade.first_seen, 0),
            *((ours, theirs, 0) for ours, theirs in zip(plan.items, cascade.items, strict=True)),
        )
        staged = torch.empty(
            plan.packed.shape, dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        flat, start = staged.numpy(), 0
        for target, array, rest in filled:
            assert array.size <= target.numel(), "the plan is too small for this step"
            flat[start : start + array.size] = array.ravel()
            start_of_rest, start = start + array.size, start + _aligned(target.numel())
            flat[start_of_rest:start] = rest
        plan.packed.copy_(staged, non_blocking=True)

    def run(
        self,
        plan: TritonTreePlan,
        pool: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes keys and values of the queries to their slots, then attends.

        ``pool``: [2, K, S, E], one layer's; ``q``: [T, H, E], ``k``, ``v``: [T, K, E] of any float
        dtype, views whose last axis is dense, rounded to the pool's dtype. ``lse``: float32[T, H],
        contiguous, gets the log-sum-exps of the scores. ``sinks``: float32[H], contiguous, scores
        that take weight and give no value. Returns [T, H · E] in ``dtype``.
        """
        size = (plan.num_tokens, self._num_heads, self._head_dim)
        assert q.shape == size
        assert q.stride(2) == 1
        assert pool.dtype == self._kv_dtype
        kv_store_triton(k, v, plan.slots, pool)
        keys, values = pool.unbind(0)
        for tile, items in zip(self._tiles, plan.items, strict=True):
            if len(items):
                self._attend(tile, items, plan, q, keys, values)
        out = torch.empty(size, dtype=self._dtype, device=self._device)
        merge_parts_triton(
            plan.partial, plan.partial_lse, plan.offsets, plan.parts, out, lse, sinks
        )
        return out.view(plan.num_tokens, -1)

    def _attend(
        self,
        tile: Tile,
        items: torch.Tensor,
        plan: TritonTreePlan,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        attend_items_kernel[(len(items), self._num_kv_heads)](
            q,
            keys,
            values,
            items,
            plan.pages,
            plan.first_seen,
            plan.partial,
            plan.partial_lse,
            q.stride(0),
            q.stride(1),
            keys.stride(0),
            self._scale * LOG2_E,
            (self._softcap or 0.0) * LOG2_E,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            PAGE_SIZE=plan.page_size,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.slots,
            BLOCK_E=max(16, triton.next_power_of_2(self._head_dim)),
            DTYPE=NAMES[self._dtype],
            PRECISION="ieee",
            WINDOWED=plan.first_seen.numel() > 0,
            CAPPED=self._softcap is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def _aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def _power_of_2(number: int) -> int:
    """0 or a power of two, at least `LEAST_ROUNDED`."""
    return number and max(LEAST_ROUNDED, triton.next_power_of_2(number))


def device_tiles(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> tuple[tuple[Tile, ...], ...]:
    """`tile_choices` for the device, as its shared memory holds them."""
    architecture = "gfx942" if torch.version.hip else "sm_90"
    found = tile_choices(head_dim, group, dtype, architecture, kv_dtype)
    if device.type != "cuda" or torch.version.hip:
        return found
    shared_bytes = _properties(device)["max_shared_mem"]
    return tuple(fit_choices(choices, head_dim, dtype.itemsize, shared_bytes) for choices in found)


def _num_programs(device: torch.device) -> int:
    """How many programs fill the device."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return PROGRAMS_PER_PROCESSOR * _properties(device)["multiprocessor_count"]


def _properties(device: torch.device) -> dict[str, int]:
    found: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(
        device.index or 0
    )
    return found
