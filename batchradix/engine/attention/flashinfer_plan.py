"""Turns the pieces of a step into levels of page tables, as FlashInfer's cascade takes them.

A level gives each of its queries one list of slots. What the queries of a range share, a tree node
say, is one entry of a level and so read once for all of them; what a query gets at its levels is
merged. Pages are of one slot, so a list names slots in any order. Only numpy: this runs once a
step, on the host.

Legend: T queries, B entries of a level, n slots that a level's entries name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchradix.types import I64

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Level:
    """Entry ``i``: queries ``[qo_indptr[i], qo_indptr[i + 1])`` attend to the slots
    ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``, all of them, or, where ``causal``, each query to
    one more than the query before it and the last one to all.

    ``qo_indptr``, ``kv_indptr``: int32[B + 1], from 0 to T and to n; ``kv_indices``: int32[n];
    ``last_page_len``: int32[B], 1, or 0 for an entry without slots: of queries that have nothing at
    this level. ``seen``: bool[T], those that have.
    """

    qo_indptr: I32
    kv_indptr: I32
    kv_indices: I32
    last_page_len: I32
    seen: NDArray[np.bool_]
    causal: bool

    @property
    def is_full(self) -> bool:
        return bool(self.seen.all())

    @property
    def mean_queries(self) -> float:
        """Queries of an entry that has slots."""
        return float(self.seen.sum() / max(self.last_page_len.sum(), 1))


@dataclass(frozen=True, slots=True)
class _Ranges:
    """The distinct query ranges of a step's pieces, parents before their children.

    ``first``, ``end``: int64[R]; the slots of range ``r`` are ``slots[offsets[r]:offsets[r + 1]]``,
    those of a causal piece last. ``depth``: how many other ranges hold a range.
    """

    first: I64
    end: I64
    is_causal: NDArray[np.bool_]
    offsets: I64
    slots: I64
    depth: I64


def plan_levels(
    context: I64,
    causal: I64,
    num_queries: int,
    *,
    max_levels: int,
    min_saved_slots: int,
) -> tuple[Level, ...]:
    """The levels of a step whose pieces are ``context`` and ``causal``, as in `Step`.

    The last one is every query's own: in it every query has slots, itself the last of them, and it
    alone is causal, where the step is. Pieces with one query range are one list. Of the depths of
    the tree those that save most become levels before it, ``max_levels - 1`` at most and each worth
    ``min_saved_slots``; the pieces at other depths go into the own lists of their queries.
    """
    ranges = _ranges(context, causal)
    bounds = np.unique(np.concatenate((ranges.first, ranges.end)))
    assert (bounds[0], bounds[-1]) == (0, num_queries), "a query has no piece"
    lowest = np.searchsorted(bounds, ranges.first)
    num_intervals = np.searchsorted(bounds, ranges.end) - lowest
    # pairs of a range and an interval in it, by range
    owners = np.repeat(np.arange(len(lowest)), num_intervals)
    intervals = _runs(lowest, num_intervals)
    innermost = np.full(len(bounds) - 1, -1)
    innermost[intervals] = owners  # the last one that is written stays: the deepest
    _check(ranges, bounds, innermost, num_intervals)

    is_own = innermost[intervals] == owners
    shared_depths = _worthwhile(ranges, owners[~is_own], max_levels - 1, min_saved_slots)
    is_own |= ~np.isin(ranges.depth[owners], shared_depths)
    levels = []
    for depth in shared_depths:
        chosen = ~is_own & (ranges.depth[owners] == depth)
        levels.append(_shared_level(ranges, bounds, owners[chosen], intervals[chosen]))
    by_interval = np.argsort(intervals[is_own], kind="stable")
    own = _level(
        ranges, bounds, owners[is_own][by_interval], intervals[is_own][by_interval],
        causal=bool(ranges.is_causal.any()),
    )  # fmt: skip
    return (*levels, own)


def _ranges(context: I64, causal: I64) -> _Ranges:
    pieces = np.zeros((len(context) + len(causal), 5), dtype=np.int64)
    pieces[: len(context), :4] = context
    pieces[len(context) :, :4] = causal
    pieces[len(context) :, 4] = 1
    pieces = pieces[(pieces[:, 1] > 0) & (pieces[:, 3] > pieces[:, 2])]
    pieces = pieces[np.lexsort((pieces[:, 4], -pieces[:, 3], pieces[:, 2]))]
    slot_start, num_slots, first, end, is_causal = pieces.T
    is_new = np.ones(len(pieces), dtype=bool)
    is_new[1:] = (np.diff(first) != 0) | (np.diff(end) != 0)
    starts = np.flatnonzero(is_new)
    first, end = first[starts], end[starts]
    ended = np.searchsorted(np.sort(end), first, side="right")
    return _Ranges(
        first=first,
        end=end,
        is_causal=np.maximum.reduceat(is_causal, starts) > 0,
        offsets=np.concatenate(([0], np.cumsum(np.add.reduceat(num_slots, starts)))),
        slots=_runs(slot_start, num_slots),
        depth=np.arange(len(starts)) - ended,  # of those before it, all that have not ended
    )


def _check(ranges: _Ranges, bounds: I64, innermost: I64, num_intervals: I64) -> None:
    """That ranges nest, and that in every query's own list its own slot is the last it sees."""
    assert (innermost >= 0).all(), "a query has no piece"
    held_by = np.zeros(len(bounds) - 1, dtype=np.int64)
    np.add.at(held_by, _runs(np.searchsorted(bounds, ranges.first), num_intervals), 1)
    assert (ranges.depth[innermost] + 1 == held_by).all(), "query ranges overlap"
    own = ranges.is_causal[innermost]
    assert own.sum() == ranges.is_causal.sum(), "something lies below a causal piece"
    assert (num_intervals[innermost[own]] == 1).all(), "something lies below a causal piece"
    assert (np.diff(bounds)[~own] == 1).all(), "two queries hold each other's slots"


def _worthwhile(ranges: _Ranges, shared: I64, most: int, min_saved_slots: int) -> I64:
    """The depths that become levels, ascending; ``shared``: a range for each interval that would
    have to list its slots otherwise."""
    num_slots, depth = np.diff(ranges.offsets), ranges.depth
    saved = np.zeros(int(depth.max()) + 1, dtype=np.int64)
    np.add.at(saved, depth[shared], num_slots[shared])
    distinct = np.unique(shared)
    np.subtract.at(saved, depth[distinct], num_slots[distinct])
    best = np.argsort(-saved, kind="stable")[:most]
    return np.sort(best[saved[best] >= max(min_saved_slots, 1)])


def _shared_level(ranges: _Ranges, bounds: I64, owners: I64, intervals: I64) -> Level:
    """Neighbouring intervals with one owner, or with none, are one entry."""
    owner_of = np.full(len(bounds) - 1, -1)
    owner_of[intervals] = owners
    starts = np.flatnonzero(np.concatenate(([True], np.diff(owner_of) != 0)))
    owner_of = owner_of[starts]
    entries = np.flatnonzero(owner_of >= 0)
    bounds = np.append(bounds[starts], bounds[-1])
    return _level(ranges, bounds, owner_of[entries], entries, causal=False)


def _level(ranges: _Ranges, bounds: I64, owners: I64, entries: I64, *, causal: bool) -> Level:
    """The level whose entry ``entries[i]``, ascending, lists the slots of range ``owners[i]``."""
    num_slots = np.diff(ranges.offsets)[owners]
    counts = np.zeros(len(bounds) - 1, dtype=np.int64)
    np.add.at(counts, entries, num_slots)
    return Level(
        qo_indptr=bounds.astype(np.int32),
        kv_indptr=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        kv_indices=ranges.slots[_runs(ranges.offsets[owners], num_slots)].astype(np.int32),
        last_page_len=(counts > 0).astype(np.int32),
        seen=np.repeat(counts > 0, np.diff(bounds)),
        causal=causal,
    )


def _runs(starts: I64, counts: I64) -> I64:
    """``start``, ``start + 1``, … ``count`` of them, one run after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts - starts, counts)
