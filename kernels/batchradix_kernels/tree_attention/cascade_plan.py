"""Cuts the pieces of a step into work items for a GPU, and lists what each query has to merge.

An item is what one program does for a key head: a block of query rows that fits a tile, over a
run of slots. Short runs spread a long node over the processors (split-KV); how long they are
depends on how much work a step has, so how sums are cut depends on the whole step. Only numpy:
this runs once a step, on the host.

Legend: T queries, n items, P parts (a query's partial result over one item).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

ITEM_FIELDS = 8
MIN_SPLIT_SLOTS = 256  # writing and merging a part costs as much as reading some slots
UNLIMITED = 1 << 30  # more slots than any piece has


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """``items``: for each height of tile, the longest first, int32[n, 8] of (first, start, end,
    query_start, num_queries, first_part, limit, 0): positions ``[start, end)`` of the piece that
    begins at ``first``, a slot or a place in the table of pages; query ``query_start + i`` sees
    positions below ``limit + i`` and its part is ``first_part + i``. The parts of query ``t`` are
    ``parts[offsets[t]:offsets[t + 1]]``, in order of position; int32[T + 1] and int32[P].
    """

    items: tuple[I32, ...]
    offsets: I32
    parts: I32

    @property
    def num_parts(self) -> int:
        return len(self.parts)


def plan_cascade(
    context: I64,
    causal: I64,
    num_queries: int,
    *,
    group: int,
    num_kv_heads: int,
    tile_rows: Sequence[int],
    num_programs: int,
    min_split_slots: int = MIN_SPLIT_SLOTS,
) -> CascadePlan:
    """``context``: int64[n, 4], ``causal``: int64[m, 4] of (first, num_slots, query_start,
    query_end) as in `tree_attention_reference`, those of a query in order of position; the last
    query of a causal piece sees all of it, each one before a slot less, so that a causal piece
    may have more slots than queries. Pieces without slots or queries are left out.

    ``tile_rows``: heights of tile, ascending; a piece gets the lowest that holds its rows
    (``group`` a query), else the highest. ``num_programs`` would fill the device; no item is
    made shorter than ``min_split_slots`` to do so.
    """
    blocks = _cut_queries(_table(context, causal), np.asarray(tile_rows), group)
    split = split_slots(int(blocks[:, 2].sum()) * num_kv_heads, num_programs, min_split_slots)
    counts = -(-blocks[:, 2] // split)
    owners = np.repeat(np.arange(len(blocks)), counts)
    start = split * _places(counts)
    first, _, end, query_start, count, _, limit, height = blocks[owners].T
    first_part = np.cumsum(count) - count
    items = np.stack(
        (
            *(first, start, np.minimum(end, start + split), query_start, count, first_part),
            *(limit, np.zeros_like(limit)),
        ),
        axis=1,
    ).astype(np.int32)
    longest_first = np.argsort(items[:, 1] - items[:, 2], kind="stable")
    items, height = items[longest_first], height[longest_first]
    queries = np.repeat(query_start, count) + _places(count)
    parts = np.argsort(queries, kind="stable")
    offsets = np.searchsorted(queries[parts], np.arange(num_queries + 1))
    return CascadePlan(
        items=tuple(items[height == index] for index in range(len(tile_rows))),
        offsets=offsets.astype(np.int32),
        parts=parts.astype(np.int32),
    )


def split_slots(total_slots: int, num_programs: int, min_split_slots: int = MIN_SPLIT_SLOTS) -> int:
    """How many slots an item takes at most, a power of two: about what each program would have
    if ``total_slots``, of all tiles and key heads, were shared out evenly."""
    share = max(total_slots // num_programs, min_split_slots)
    return 1 << (share.bit_length() - 1)


def _table(context: I64, causal: I64) -> I64:
    """int64[n + m, 5] of (first, num_slots, query_start, query_end, is_causal)."""
    pieces = np.zeros((len(context) + len(causal), 5), dtype=np.int64)
    pieces[: len(context), :4] = context
    pieces[len(context) :, :4] = causal
    pieces[len(context) :, 4] = 1
    return pieces[(pieces[:, 1] > 0) & (pieces[:, 3] > pieces[:, 2])]


def _cut_queries(pieces: I64, tile_rows: NDArray[np.int_], group: int) -> I64:
    """Blocks of queries that fit a tile: int64[b, 8] of (first, 0, num_slots, query_start,
    num_queries, 0, limit, index of the tile's height)."""
    num_queries = pieces[:, 3] - pieces[:, 2]
    height = np.searchsorted(tile_rows, num_queries * group)
    height = np.minimum(height, len(tile_rows) - 1)
    most = tile_rows[height] // group
    assert (most > 0).all(), "a tile must hold the query heads of a key head"
    counts = -(-num_queries // most)
    owners = np.repeat(np.arange(len(pieces)), counts)
    first, num_slots, piece_start, piece_end, is_causal = pieces[owners].T
    query_start = piece_start + _places(counts) * most[owners]
    query_end = np.minimum(query_start + most[owners], piece_end)
    hidden = np.where(is_causal > 0, piece_end - query_end, 0)  # from all of the block
    end = np.maximum(num_slots - hidden, 0)
    count = query_end - query_start
    limit = np.where(is_causal > 0, end - count + 1, UNLIMITED)
    zero = np.zeros_like(first)
    return np.stack((first, zero, end, query_start, count, zero, limit, height[owners]), axis=1)


def _places(counts: I64) -> I64:
    """0, 1, … up to each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
