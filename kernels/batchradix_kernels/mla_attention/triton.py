"""Attention of latents over all pieces of a step in Triton, absorbed and expanded, in one kernel.

The key of a head is in two parts: one without a position, ``A`` wide, and a rope part ``R`` wide
that all heads share. Absorbed, the first part is the latent, which all heads share too and which
is also the value: it is loaded once and multiplied twice. Expanded, each head has its own first
part and its own value. A program walks one item of `plan_cascade` for one block of heads, with an
online softmax, and writes a normalised partial result with its log-sum-exp, as in
`batchradix_kernels.tree_attention.triton`, whose numerics it shares.

Legend: T queries, H query heads, G heads of a block, S slots, A and R the parts of a key, V a
value, M rows (queries times the heads of a block) and N slots of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from batchradix_kernels.lse_merge.triton import merge_parts_triton
from batchradix_kernels.mla_attention.tiles import choose_tiles, heads_of_block, padded
from batchradix_kernels.tree_attention.cascade_plan import I32, I64, plan_cascade
from batchradix_kernels.tree_attention.tiles import Tile

__all__ = ["LatentPlan", "TritonLatentAttention", "attend_latent_items_kernel"]

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3e38)  # below every score, and finite: -inf - -inf is NaN
PROGRAMS_PER_PROCESSOR = 2
INTERPRETER_PROGRAMS = 8
# A part is written and read again: with 128 absorbed heads that weighs as much as 455 slots.
MIN_SPLIT_SLOTS = 512
ALIGNMENT = 4  # int32 numbers, so that each array of an upload begins at 16 bytes


@triton.jit
def _load_rows(rows, slot_N, stride, real_N, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[N, BLOCK] of rows ``stride`` apart, ``SIZE`` numbers each, zero where there is none."""
    at = tl.arange(0, BLOCK)
    places = rows + slot_N.to(tl.int64)[:, None] * stride + at[None, :]
    mask = real_N[:, None]
    if BLOCK > SIZE:
        mask = mask & (at < SIZE)[None, :]
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def _attend_tile(
    q_MA, q_MR, top_M, total_M, sums_MV, keys, ropes, values, pages, first, start, end, seen_M,
    scale_log2, key_stride, rope_stride, value_stride,
    KEY_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, ABSORBED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes positions ``[start, start + BLOCK_N)`` below ``end`` into the running softmax."""
    n = start + tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        slot_N = first + n
    else:
        page_N = tl.load(pages + first + n // PAGE_SIZE, mask=n < end, other=0)
        slot_N = page_N * PAGE_SIZE + n % PAGE_SIZE
    k_NA = _load_rows(keys, slot_N, key_stride, n < end, KEY_DIM, BLOCK_A)
    k_NR = _load_rows(ropes, slot_N, rope_stride, n < end, ROPE_DIM, BLOCK_R)
    scores_MN = tl.dot(q_MA, tl.trans(k_NA), input_precision=PRECISION)
    scores_MN = tl.dot(q_MR, tl.trans(k_NR), scores_MN, input_precision=PRECISION) * scale_log2
    scores_MN = tl.where(n[None, :] < seen_M[:, None], scores_MN, float("-inf"))
    if ABSORBED:
        v_NV = k_NA
    else:
        v_NV = _load_rows(values, slot_N, value_stride, n < end, VALUE_DIM, BLOCK_V)
    higher_M = tl.maximum(top_M, tl.max(scores_MN, 1))
    weights_MN = tl.exp2(scores_MN - higher_M[:, None])
    kept_M = tl.exp2(top_M - higher_M)
    total_M = total_M * kept_M + tl.sum(weights_MN, 1)
    sums_MV = sums_MV * kept_M[:, None]
    sums_MV += tl.dot(weights_MN.to(v_NV.dtype), v_NV, input_precision=PRECISION)
    return higher_M, total_M, sums_MV


@triton.jit
def attend_latent_items_kernel(
    q, q_rope, keys, ropes, values, items, pages, partial, partial_lse,
    q_token_stride, q_head_stride, q_rope_token_stride, q_rope_head_stride,
    key_stride, key_head_stride, rope_stride, value_stride, value_head_stride,
    scale_log2,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, ABSORBED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Item ``i`` for heads from ``b · GROUP`` on: blocks of heads that read the same slots run
    side by side. An item without queries does nothing."""
    NUM_BLOCKS: tl.constexpr = (NUM_HEADS + GROUP - 1) // GROUP
    item = items + tl.program_id(0) // NUM_BLOCKS * 8
    block = tl.program_id(0) % NUM_BLOCKS
    first = tl.load(item)
    start = tl.load(item + 1)
    end = tl.load(item + 2)
    query_start = tl.load(item + 3)
    num_queries = tl.load(item + 4)
    limit = tl.load(item + 6)
    if num_queries == 0:
        return

    query_M = tl.arange(0, BLOCK_M) // GROUP
    head_M = block * GROUP + tl.arange(0, BLOCK_M) % GROUP
    real_M = query_M < num_queries
    if NUM_BLOCKS * GROUP > NUM_HEADS:
        real_M = real_M & (head_M < NUM_HEADS)
    token_M = (query_start + query_M).to(tl.int64)
    q_MA = _load_rows(
        q, token_M * q_token_stride + head_M * q_head_stride, 1, real_M, KEY_DIM, BLOCK_A
    )
    rope_M = token_M * q_rope_token_stride + head_M * q_rope_head_stride
    q_MR = _load_rows(q_rope, rope_M, 1, real_M, ROPE_DIM, BLOCK_R)
    keys += block.to(tl.int64) * key_head_stride
    values += block.to(tl.int64) * value_head_stride

    seen_M = tl.minimum(limit + query_M, end)
    top_M = tl.full([BLOCK_M], LOWEST, tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    sums_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Loops of their own for tiles without masks, as in the other kernel, spill here.
    for n in range(start, end, BLOCK_N):
        top_M, total_M, sums_MV = _attend_tile(
            q_MA, q_MR, top_M, total_M, sums_MV, keys, ropes, values, pages, first, n, end, seen_M,
            scale_log2, key_stride, rope_stride, value_stride, KEY_DIM, ROPE_DIM, VALUE_DIM,
            PAGE_SIZE, BLOCK_N, BLOCK_A, BLOCK_R, BLOCK_V, ABSORBED, PRECISION,
        )  # fmt: skip

    divisor_M = tl.where(total_M == 0.0, 1.0, total_M)
    first_part = tl.load(item + 5)  # not before: registers are scarce in the loop
    place_M = (first_part + query_M).to(tl.int64) * NUM_HEADS + head_M
    v = tl.arange(0, BLOCK_V)
    place_MV = place_M[:, None] * VALUE_DIM + v[None, :]
    mask_MV = real_M[:, None] & (v < VALUE_DIM)[None, :]
    tl.store(partial + place_MV, sums_MV / divisor_M[:, None], mask=mask_MV)
    top_M = tl.where(total_M == 0.0, float("-inf"), top_M)
    lse_M = (top_M + tl.log2(divisor_M)) * LN_2
    tl.store(partial_lse + place_M, lse_M, mask=real_M)


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """A step's items on the device, by chunk and height of tile, with room for its parts.

    ``extra``: float32[n, H, V] and ``extra_lse``: float32[n, H], the parts that the caller of
    `TritonLatentAttention.plan` fills in.
    """

    page_size: int
    pages: torch.Tensor
    chunks: tuple[tuple[torch.Tensor, ...], ...]
    offsets: torch.Tensor
    parts: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
    num_extra: int

    @property
    def extra(self) -> torch.Tensor:
        return self.partial[len(self.partial) - self.num_extra :]

    @property
    def extra_lse(self) -> torch.Tensor:
        return self.partial_lse[len(self.partial) - self.num_extra :]


class TritonLatentAttention:
    """One form of latent attention: plans once a step, attends and merges once a layer.

    ``key_dim``: of a key's first part; ``value_dim``: the same where ``absorbed``; ``dtype``
    (float32, float16 or bfloat16): of queries, keys and values; ``scale`` multiplies the scores.
    """

    def __init__(
        self,
        *,
        absorbed: bool,
        num_heads: int,
        key_dim: int,
        rope_dim: int,
        value_dim: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert value_dim == key_dim or not absorbed
        self._absorbed = absorbed
        self._num_heads = num_heads
        self._dims = (key_dim, rope_dim, value_dim)
        self._scale = scale
        self._dtype = dtype
        self._device = device
        widths = [padded(dim) for dim in self._dims[: 2 if absorbed else 3]]
        self._tiles, self._num_programs = _suit(absorbed, sum(widths), num_heads, dtype, device)
        self._group = heads_of_block(num_heads, self._tiles) if absorbed else 1
        self._num_blocks = -(-num_heads // self._group)

    def plan(
        self,
        context: I64,
        causal: I64,
        num_queries: int,
        *,
        pages: I32 | None = None,
        page_size: int = 0,
        chunk_ends: Sequence[int] | None = None,
        extra_queries: I64 | None = None,
    ) -> LatentPlan:
        """``context``, ``causal``: pieces as in `plan_cascade`; with ``pages`` they begin at a
        place in tables of page numbers, as in `TritonTreeAttention.plan`.

        ``chunk_ends``: slots are given to `attend` in chunks, which end at these, ascending; no
        piece lies in two of them. ``extra_queries``: int64[n], ascending, have each a part
        that the caller computes, whatever else they have.
        """
        plan = plan_cascade(
            context,
            causal,
            num_queries,
            group=self._group,
            num_kv_heads=self._num_blocks,
            tile_rows=[tile.rows for tile in self._tiles],
            num_programs=self._num_programs,
            min_split_slots=MIN_SPLIT_SLOTS,
        )
        extra = np.zeros(0, dtype=np.int64) if extra_queries is None else extra_queries
        offsets = plan.offsets + np.searchsorted(extra, np.arange(num_queries + 1))
        numbers = plan.num_parts + np.arange(len(extra))
        parts = np.insert(plan.parts, plan.offsets[extra], numbers)
        by_chunk = _by_chunk(plan.items, chunk_ends)
        table = np.zeros(0, dtype=np.int32) if pages is None else pages
        pages_, offsets_, parts_, *items = _upload(
            [
                *(table, offsets.astype(np.int32), parts.astype(np.int32)),
                *(heights for chunk in by_chunk for heights in chunk),
            ],
            self._device,
        )
        num_heights = len(self._tiles)
        size = (len(parts), self._num_heads, self._dims[2])
        return LatentPlan(
            page_size=0 if pages is None else page_size,
            pages=pages_,
            chunks=tuple(
                tuple(items[at : at + num_heights]) for at in range(0, len(items), num_heights)
            ),
            offsets=offsets_,
            parts=parts_,
            partial=torch.empty(size, dtype=torch.float32, device=self._device),
            partial_lse=torch.empty(size[:2], dtype=torch.float32, device=self._device),
            num_extra=len(extra),
        )

    def attend(
        self,
        plan: LatentPlan,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        keys: torch.Tensor,
        ropes: torch.Tensor,
        values: torch.Tensor | None = None,
        *,
        chunk: int = 0,
    ) -> None:
        """Computes the parts over one chunk, whose slots are counted from its own start.

        Shapes and dtypes as in `mla_attention`.
        """
        assert q.dtype == q_rope.dtype == keys.dtype == ropes.dtype == self._dtype
        assert (values is None) == self._absorbed
        values = keys if values is None else values
        for tensor in (q, q_rope, keys, ropes, values):
            assert tensor.stride(-1) == 1
        for tile, items in zip(self._tiles, plan.chunks[chunk], strict=True):
            if len(items):
                self._attend(tile, items, plan, (q, q_rope, keys, ropes, values))

    def merge(self, plan: LatentPlan, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Merges all parts of each query into ``out``: [T, H, V] of any float dtype, and ``lse``:
        float32[T, H], both contiguous, as `merge_parts` does."""
        merge_parts_triton(plan.partial, plan.partial_lse, plan.offsets, plan.parts, out, lse)

    def _attend(
        self,
        tile: Tile,
        items: torch.Tensor,
        plan: LatentPlan,
        tensors: tuple[torch.Tensor, ...],
    ) -> None:
        q, q_rope, keys, ropes, values = tensors
        key_dim, rope_dim, value_dim = self._dims
        attend_latent_items_kernel[(len(items) * self._num_blocks,)](
            *(q, q_rope, keys, ropes, values, items, plan.pages, plan.partial, plan.partial_lse),
            *q.stride()[:2],
            *q_rope.stride()[:2],
            keys.stride(1),
            0 if self._absorbed else keys.stride(0),
            ropes.stride(0),
            values.stride(1),
            0 if self._absorbed else values.stride(0),
            self._scale * LOG2_E,
            NUM_HEADS=self._num_heads,
            GROUP=self._group,
            KEY_DIM=key_dim,
            ROPE_DIM=rope_dim,
            VALUE_DIM=value_dim,
            PAGE_SIZE=plan.page_size,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.slots,
            BLOCK_A=padded(key_dim),
            BLOCK_R=padded(rope_dim),
            BLOCK_V=padded(value_dim),
            ABSORBED=self._absorbed,
            PRECISION="ieee",
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def _by_chunk(heights: Sequence[I32], chunk_ends: Sequence[int] | None) -> list[tuple[I32, ...]]:
    """Items by chunk, their places counted from its start."""
    if chunk_ends is None:
        return [tuple(heights)]
    chunks = []
    for start, end in zip((0, *chunk_ends), chunk_ends, strict=False):
        inside = [items[(items[:, 0] >= start) & (items[:, 0] < end)] for items in heights]
        for items in inside:
            items[:, 0] -= start
        chunks.append(tuple(inside))
    return chunks


def _upload(arrays: Sequence[I32], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, copied there at once."""
    starts = np.cumsum([0, *(-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays)])
    packed = torch.zeros(int(starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = packed.numpy()
    for start, array in zip(starts.tolist(), arrays, strict=False):
        flat[start : start + array.size] = array.ravel()
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(array.shape)
        for start, array in zip(starts.tolist(), arrays, strict=False)
    ]


def _suit(
    absorbed: bool, width: int, num_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tile, ...], int]:
    """Tiles for the device, and how many programs fill it."""
    if device.type != "cuda":
        tiles = choose_tiles(absorbed=absorbed, width=width, num_heads=num_heads, dtype=dtype)
        return tiles, INTERPRETER_PROGRAMS
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    tiles = choose_tiles(
        absorbed=absorbed,
        width=width,
        num_heads=num_heads,
        dtype=dtype,
        architecture="gfx942" if torch.version.hip else "sm_90",
        shared_bytes=properties["max_shared_mem"],
    )
    return tiles, PROGRAMS_PER_PROCESSOR * properties["multiprocessor_count"]
