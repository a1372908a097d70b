"""Attention over all pieces of a step in C: one call a layer, float32 or bfloat16 pools.

Each thread owns some query rows (a query token and one query head of a key head's group) and
takes them through their pieces in order of position with an online softmax (Milakov and
Gimelshein 2018), so nothing is merged between pieces or threads. The pieces are cut in blocks of
32 slots that are aligned in the pool, for AMX in windows of two of them. A row's result depends
on its own query and pieces alone, not on which rows are computed beside it or by which thread.

Numerics: float32 throughout for a float32 pool. For bfloat16 scores, softmax and sums are
float32; AVX512-BF16 and AMX round the softmax weights to bfloat16 for the product with the values
(relative error up to 2**-9 each), the other levels do not. The weights that a causal limit or a
sliding window hides never meet a NaN or an infinity of the values they hide; a query with a NaN
among its own scores or values gets NaN.

Legend: T queries, H query heads, K key heads, E head dimension, S slots, n and m pieces.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from batchradix_kernels.native import FLOATS, KINDS, library
from batchradix_kernels.tree_attention.window import piece_table, windowed

__all__ = ["CpuTreeAttention", "CpuTreePlan", "PairedPool", "is_supported"]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

BLOCK = 32  # as in cpu.h
WINDOW = 64  # as in cpu.h: positions at whose multiples `plan_windows` cuts
MAX_HEAD_DIM = 640  # as in cpu.h
ITEMS_PER_THREAD = 3  # so that a thread that is held up has others take its items
MAX_ITEM_ELEMENTS = 1 << 15  # rows · E of an item: its state stays in the second-level cache
PIECE_ROWS = 8  # reading a piece's keys and values costs about as much as so many rows


class _Plan(ctypes.Structure):
    """``struct plan`` of plan.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("num_items", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("max_rows", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("num_slots", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("item_pieces", ctypes.c_void_p),
        ("first_seen", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


class _Heads(ctypes.Structure):
    """``struct heads`` of plan.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class _Layer(ctypes.Structure):
    """``struct layer`` of plan.h."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("q", _Heads),
        ("k", _Heads),
        ("v", _Heads),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
    )


def is_supported(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the C kernels were built and compute this; the device must be the CPU."""
    return library() is not None and dtype in FLOATS and 1 <= head_dim <= MAX_HEAD_DIM


@dataclass(frozen=True, slots=True)
class PairedPool:
    """Keys and values of ``S`` slots, S and the head dimension rounded up to 32.

    ``storage``: [layers, 2, K, S · E]. In float32 keys lie as [S / 16, E, 16] and values as
    [S, E]; in bfloat16, paired along the sum of the product they are in, keys as
    [S / 16, E / 2, 16, 2] and values as [S / 2, E, 2].
    """

    storage: torch.Tensor
    num_slots: int
    head_dim: int

    @classmethod
    def allocate(
        cls, num_layers: int, num_kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype
    ) -> PairedPool:
        """A pool with undefined memory."""
        num_slots, padded = _round_up(num_slots), _round_up(head_dim)
        size = (num_layers, 2, num_kv_heads, num_slots * padded)
        return cls(torch.empty(size, dtype=dtype), num_slots, head_dim)

    def read(self, layer: int, slots: I64) -> torch.Tensor:
        """A copy of the keys and values of n slots: [2, K, n, E]."""
        at = torch.from_numpy(slots)
        keys, values = self._views(layer)
        padded, width = _round_up(self.head_dim), keys.shape[-1]
        read = (keys[:, at // 16, :, at % 16], values[:, at // width, :, at % width])
        rows = torch.stack([part.reshape(len(slots), keys.shape[0], padded) for part in read])
        return rows[..., : self.head_dim].transpose(1, 2)

    def write(self, layer: int, slots: I64, kv: torch.Tensor) -> None:
        """Sets the keys and values of n slots; ``kv``: [2, K, n, E] of the pool's dtype."""
        at = torch.from_numpy(slots)
        keys, values = self._views(layer)
        padded, width = _round_up(self.head_dim), keys.shape[-1]
        rows = torch.nn.functional.pad(kv, (0, padded - self.head_dim)).transpose(1, 2)
        keys[:, at // 16, :, at % 16] = rows[0].reshape(*rows.shape[1:3], padded // width, width)
        values[:, at // width, :, at % width] = rows[1]

    def fill(self, slot_start: int, num_slots: int, value: float) -> None:
        """Sets keys and values of a run of slots to one number, in every layer."""
        end = slot_start + num_slots
        first, last = -(-slot_start // BLOCK), end // BLOCK  # blocks that are filled whole
        edges = np.arange(slot_start, end)
        if first < last:
            blocks = self.storage.view(*self.storage.shape[:3], self.num_slots // BLOCK, -1)
            blocks[:, :, :, first:last] = value
            edges = edges[(edges < first * BLOCK) | (edges >= last * BLOCK)]
        num_layers, _, num_kv_heads, _ = self.storage.shape
        size = (2, num_kv_heads, len(edges), self.head_dim)
        kv = torch.full(size, value, dtype=self.storage.dtype)
        for layer in range(num_layers):
            self.write(layer, edges, kv)

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [K, S / 16, E / w, 16, w] and values [K, S / w, E, w] with w elements paired."""
        width = 4 // self.storage.element_size()
        keys, values = self.storage[layer]
        padded = _round_up(self.head_dim)
        return (
            keys.view(-1, self.num_slots // 16, padded // width, 16, width),
            values.view(-1, self.num_slots // width, padded, width),
        )


class CpuTreePlan:
    """A step's pieces and how threads share them, ready for C; holds what its pointers name."""

    def __init__(self, plan: _Plan, held: tuple[object, ...]) -> None:
        self.argument = plan
        self.layer = _Layer()
        self._held = held


class CpuTreeAttention:
    """Plans once a step, runs once a layer.

    ``dtype`` (float32 or bfloat16) is that of pool and output; ``scale`` multiplies the scores,
    which with a ``softcap`` then become ``softcap * tanh(score / softcap)``.
    One object must not run in two threads at once: they would share its scratch.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
        softcap: float | None = None,
    ) -> None:
        assert is_supported(dtype, head_dim), f"no C kernel for {dtype} and {head_dim}"
        loaded = library()
        assert loaded is not None
        loaded.bx_tree_attention_scratch.restype = ctypes.c_int64
        self._library = loaded
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = scale
        self._softcap = softcap or 0.0
        self._dtype = dtype
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_layers: int, num_slots: int) -> PairedPool:
        """A pool with undefined memory."""
        return PairedPool.allocate(
            num_layers, self._num_kv_heads, num_slots, self._head_dim, self._dtype
        )

    def plan(
        self,
        slots: I64,
        context: I64,
        causal: I64,
        num_slots: int,
        *,
        window: int | None = None,
    ) -> CpuTreePlan:
        """``slots``: int64[T], where each query's key and value go in a pool of ``num_slots``;
        ``context``: int64[n, 4], ``causal``: int64[m, 4], pieces as in
        `tree_attention_reference`, those of a query in order of position; with a ``window`` a
        query sees the last so many of its slots.
        """
        table = piece_table(context, causal)
        parts = np.zeros((len(table), 2), dtype=np.int64)
        return self._plan(slots, table, parts, np.zeros((0, 2), dtype=np.int32), num_slots, window)

    def plan_windows(
        self,
        slots: I64,
        runs: I64,
        parts: I64,
        num_slots: int,
        *,
        window: int | None = None,
    ) -> CpuTreePlan:
        """A plan whose partial sums are cut at absolute positions, whatever the pieces are.

        ``runs``: int64[n, 6] of (first_part, end_part, query_start, query_end, num_positions,
        limit), those of a query in order of position, each from a multiple of `WINDOW`
        positions on;
        query ``query_start + i`` sees the first ``limit + i`` positions of the slots that the
        parts, int64[m, 2] of (slot_start, num_slots), make up one after the other; with a sliding
        ``window`` the last so many of them.
        """
        table = np.zeros((len(runs), 5), dtype=np.int64)
        table[:, 1:] = runs[:, [4, 2, 3, 5]]
        return self._plan(slots, table, runs[:, :2], parts.astype(np.int32), num_slots, window)

    def _plan(
        self,
        slots: I64,
        table: I64,
        parts_of: I64,
        parts: I32,
        num_slots: int,
        window: int | None,
    ) -> CpuTreePlan:
        """``table``: as in `window`; ``parts_of``: int64[n, 2], the parts of each of its rows."""
        first_seen = np.zeros(0, dtype=np.int32)
        pieces = np.zeros((len(table), 9), dtype=np.int32)
        if window is not None:
            found = windowed(table, len(slots), window)
            table, parts_of = found.pieces, parts_of[found.rows]
            first_seen = found.first_seen.astype(np.int32)
            pieces = np.zeros((len(table), 9), dtype=np.int32)
            pieces[:, 8] = found.starts
        pieces[:, :4] = table[:, :4]
        pieces[:, 4] = table[:, 4] < table[:, 1]
        pieces[:, 5] = table[:, 4]
        pieces[:, 6:8] = parts_of
        num_threads = torch.get_num_threads()
        group = self._num_heads // self._num_kv_heads
        ranges = self._cut(pieces, first_seen, len(slots), num_threads)
        starts, ends = pieces[:, 2], pieces[:, 3]
        lists = [np.flatnonzero((starts < end) & (ends > start)) for _, start, end in ranges]
        bounds = np.cumsum([0, *map(len, lists)])
        items = np.array(
            [(*ranges[i], bounds[i], bounds[i + 1]) for i in range(len(ranges))], dtype=np.int32
        )
        item_pieces = np.concatenate(lists).astype(np.int32)
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        max_rows = group * max(end - start for _, start, end in ranges)
        scratch = self._make_scratch(num_threads, max_rows)
        plan = _Plan(
            dtype=KINDS[self._dtype],
            num_tokens=len(slots),
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            num_items=len(items),
            num_threads=num_threads,
            max_rows=max_rows,
            scale=self._scale,
            softcap=self._softcap,
            num_slots=_round_up(num_slots),
            slots=slots.ctypes.data,
            pieces=pieces.ctypes.data,
            parts=parts.ctypes.data,
            items=items.ctypes.data,
            item_pieces=item_pieces.ctypes.data,
            first_seen=None if window is None else first_seen.ctypes.data,
            scratch=scratch.data_ptr(),
        )
        held = (slots, pieces, parts, items, item_pieces, first_seen, scratch)
        return CpuTreePlan(plan, held)

    def run(
        self,
        plan: CpuTreePlan,
        pool: PairedPool,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes keys and values of the queries into the pool, then attends.

        ``q``: [T, H, E], ``k``, ``v``: [T, K, E], each float32 or bfloat16, strided views whose
        last axis is dense; rounded to the pool's dtype. ``lse``: float32[T, H], contiguous, gets
        the log-sum-exps of the scores. ``sinks``: float32[H], contiguous, scores that take weight
        and give no value. Returns [T, H · E] in the pool's dtype.
        """
        num_tokens = plan.argument.num_tokens
        assert q.shape == (num_tokens, self._num_heads, self._head_dim)
        assert k.shape == v.shape == (num_tokens, self._num_kv_heads, self._head_dim)
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
        out = torch.empty((num_tokens, self._num_heads * self._head_dim), dtype=self._dtype)
        keys, values = pool.storage[layer].unbind(0)
        call = plan.layer
        call.keys, call.values = keys.data_ptr(), values.data_ptr()
        held = [_point(to, x) for to, x in ((call.q, q), (call.k, k), (call.v, v))]
        call.out = out.data_ptr()
        call.lse = None if lse is None else lse.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        self._library.bx_tree_attention(ctypes.byref(plan.argument), ctypes.byref(call))
        del held
        return out

    def _make_scratch(self, num_threads: int, max_rows: int) -> torch.Tensor:
        size = num_threads * self._library.bx_tree_attention_scratch(self._head_dim, max_rows)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch

    def _cut(
        self, pieces: I32, first_seen: I32, num_tokens: int, num_threads: int
    ) -> list[tuple[int, int, int]]:
        """(key head, query_start, query_end) of every item: parts of about equal cost."""
        group = self._num_heads // self._num_kv_heads
        cost = _cost_of_queries(pieces, first_seen, num_tokens, group)
        num_parts = num_threads * ITEMS_PER_THREAD if num_threads > 1 else 1
        ends = np.cumsum(np.tile(cost, self._num_kv_heads))
        places = np.searchsorted(ends, ends[-1] * np.arange(1, num_parts) / num_parts) + 1
        most = max(1, MAX_ITEM_ELEMENTS // (group * _round_up(self._head_dim)))
        ranges: list[tuple[int, int, int]] = []
        for head in range(self._num_kv_heads):
            cuts = places - head * num_tokens
            edges = np.unique([0, *cuts[(cuts > 0) & (cuts < num_tokens)], num_tokens])
            for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                count = -(-(end - start) // most)
                marks = np.linspace(start, end, count + 1).astype(int).tolist()
                ranges.extend((head, marks[i], marks[i + 1]) for i in range(count))
        return ranges


def _cost_of_queries(
    pieces: I32, first_seen: I32, num_tokens: int, group: int
) -> NDArray[np.float64]:
    """float64[T]: the slots that each query's rows are multiplied with, reading them included."""
    if len(first_seen):
        return _cost_within_windows(pieces, first_seen, group)
    change = np.zeros(num_tokens + 1)
    cost = np.zeros(num_tokens)
    for _, num_slots, start, end, causal in pieces[:, :5].tolist():
        rows = group + PIECE_ROWS / (end - start)
        if causal:
            cost[start:end] += rows * np.arange(1 + BLOCK, end - start + 1 + BLOCK)
        else:
            change[start] += rows * (num_slots + BLOCK)
            change[end] -= rows * (num_slots + BLOCK)
    return cost + np.cumsum(change[:-1])


def _cost_within_windows(pieces: I32, first_seen: I32, group: int) -> NDArray[np.float64]:
    cost = np.zeros(len(first_seen))
    for _, num_slots, start, end, causal, limit, _, _, position in pieces.tolist():
        rows = group + PIECE_ROWS / (end - start)
        ends = np.arange(limit, limit + end - start) if causal else num_slots
        lows = np.maximum(first_seen[start:end] - position, 0)
        cost[start:end] += rows * (np.maximum(np.minimum(ends, num_slots) - lows, 0) + BLOCK)
    return cost


def _point(to: _Heads, heads: torch.Tensor) -> torch.Tensor:
    """Fills in ``to``; returns the tensor that must live as long as it is used."""
    if heads.stride(2) != 1:
        heads = heads.contiguous()
    to.data = heads.data_ptr()
    to.token_stride, to.head_stride, _ = heads.stride()
    to.dtype = KINDS[heads.dtype]
    return heads


def _round_up(count: int) -> int:
    return -(-count // BLOCK) * BLOCK
