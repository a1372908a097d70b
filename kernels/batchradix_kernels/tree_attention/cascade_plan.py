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

from batchradix_kernels.tree_attention.window import piece_table, windowed

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

ITEM_FIELDS = 8
MIN_SPLIT_SLOTS = 256  # writing and merging a part costs as much as reading some slots
UNLIMITED = 1 << 30  # more slots than any piece has


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """``items``: for each height of tile, the longest first, int32[n, 8] of (first, start, end,
    query_start, num_queries, first_part, limit, before): positions ``[start, end)`` of the piece
    that begins at ``first``, a slot or a place in the table of pages; query ``query_start + i``
    sees positions below ``limit + i`` and its part is ``first_part + i``. With a window, query
    ``t`` sees those from ``first_seen[t] - before`` on, int32[T], ``before`` being how much there
    is of a query's prompt before the piece; else ``first_seen`` is empty. The parts of query ``t``
    are ``parts[offsets[t]:offsets[t + 1]]``, in order of position; int32[T + 1] and int32[P].
    """

    items: tuple[I32, ...]
    offsets: I32
    parts: I32
    first_seen: I32

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
    window: int | None = None,
) -> CascadePlan:
    """``context``: int64[n, 4], ``causal``: int64[m, 4] of (first, num_slots, query_start,
    query_end) as in `tree_attention_reference`, those of a query in order of position; the last
    query of a causal piece sees all of it, each one before a slot less, so that a causal piece
    may have more slots than queries. Pieces without slots or queries are left out.

    ``tile_rows``: heights of tile, ascending; a piece gets the lowest that holds its rows
    (``group`` a query), else the highest. ``num_programs`` would fill the device; no item is
    made shorter than ``min_split_slots`` to do so. With a ``window`` queries see the last so many
    of their slots, and items have none that their queries all do not see.
    """
    table = piece_table(context, causal)
    table = table[(table[:, 1] > 0) & (table[:, 3] > table[:, 2])]
    heights = np.asarray(tile_rows)
    if window is None:
        first_seen = np.zeros(0, dtype=np.int64)
        blocks = _cut_queries(table, np.zeros(len(table), dtype=np.int64), heights, group)
    else:
        found = windowed(table, num_queries, window)
        first_seen = found.first_seen
        blocks = _cut_queries(found.pieces, found.starts, heights, group)
        blocks[:, 1] = np.maximum(_least(first_seen, blocks[:, 3], blocks[:, 4]) - blocks[:, 5], 0)
    num_slots = blocks[:, 2] - blocks[:, 1]
    split = split_slots(int(num_slots.sum()) * num_kv_heads, num_programs, min_split_slots)
    counts = -(-num_slots // split)
    owners = np.repeat(np.arange(len(blocks)), counts)
    first, low, end, query_start, count, position, limit, height = blocks[owners].T
    start = low + split * _places(counts)
    first_part = np.cumsum(count) - count
    items = np.stack(
        (
            *(first, start, np.minimum(end, start + split), query_start, count, first_part),
            *(limit, position),
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
        first_seen=first_seen.astype(np.int32),
    )


def split_slots(total_slots: int, num_programs: int, min_split_slots: int = MIN_SPLIT_SLOTS) -> int:
    """How many slots an item takes at most, a power of two: about what each program would have
    if ``total_slots``, of all tiles and key heads, were shared out evenly."""
    share = max(total_slots // num_programs, min_split_slots)
    return 1 << (share.bit_length() - 1)


def _cut_queries(pieces: I64, starts: I64, tile_rows: NDArray[np.int_], group: int) -> I64:
    """Blocks of queries that fit a tile: int64[b, 8] of (first, 0, num_slots, query_start,
    num_queries, position, limit, index of the tile's height); ``pieces``: a table as in `window`,
    ``starts`` their positions."""
    num_queries = pieces[:, 3] - pieces[:, 2]
    height = np.searchsorted(tile_rows, num_queries * group)
    height = np.minimum(height, len(tile_rows) - 1)
    most = tile_rows[height] // group
    assert (most > 0).all(), "a tile must hold the query heads of a key head"
    counts = -(-num_queries // most)
    owners = np.repeat(np.arange(len(pieces)), counts)
    first, num_slots, piece_start, piece_end, limit = pieces[owners].T
    query_start = piece_start + _places(counts) * most[owners]
    count = np.minimum(query_start + most[owners], piece_end) - query_start
    limit = np.where(limit < num_slots, limit + query_start - piece_start, UNLIMITED)
    end = np.clip(limit + count - 1, 0, num_slots)
    zero = np.zeros_like(first)
    columns = (first, zero, end, query_start, count, starts[owners], limit, height[owners])
    return np.stack(columns, axis=1)


def _least(values: I64, first: I64, count: I64) -> I64:
    """The least of each run of values."""
    if len(first) == 0:
        return first
    edges = np.stack((first, first + count), axis=1).ravel()
    return np.minimum.reduceat(np.append(values, values[-1]), edges)[::2]


def _places(counts: I64) -> I64:
    """0, 1, … up to each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
