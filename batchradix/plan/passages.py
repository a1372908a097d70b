"""An order for the items of a list in each row, such that rows share more of them.

Where the order of passages says nothing, rows with the same passages can begin with these. Of all
passages the one that saves most by standing first, for the rows that have it, goes first there;
then the same again for these rows and what they have left, and for the other rows. What a row
shares with none of its group stays in its own order, at the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from batchradix.plan.numbering import numbered
from batchradix.types import I32, I64

_SMALL_GROUP = 8  # rows; fewer take what they share in one order


def order_passages(codes: I64, offsets: I64, tokens: I32) -> I32:
    """int32[m]: of each row the places of its items, in the order in which they are to stand.

    Row ``i`` has the items ``[offsets[i], offsets[i + 1])``, int64[n + 1], of ``codes``: int64[m],
    equal for equal items and numbered by first appearance; ``tokens``: int32[m], how long each is.
    The same for the same arguments.
    """
    orders = np.zeros(len(codes), dtype=np.int32)
    lengths = np.diff(offsets)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    place_of = np.arange(len(codes)) - offsets[row_of]
    items = _each_once(codes, row_of)
    filled = offsets[:-1].copy()  # where the next item of a row goes
    waiting = [np.arange(len(codes))]
    while waiting:
        entries = waiting.pop()
        if not len(entries):
            continue
        for chosen, left in _groups(items[entries], row_of[entries], tokens[entries]):
            first, rest = entries[chosen], entries[left]
            rows = row_of[first]
            orders[filled[rows]] = place_of[first]
            filled[rows] += 1
            if len(rows) > _SMALL_GROUP:
                waiting.append(rest)
                continue
            rest = rest[_by_savings(items[rest], row_of[rest], tokens[rest])]
            orders[filled[row_of[rest]] + _rank(row_of[rest])] = place_of[rest]
    return orders


def computed_tokens(codes: I64, offsets: I64, tokens: I32, orders: I32) -> int:
    """Tokens of the items that have to be computed where each row has them in its order: those of
    each distinct beginning once. Arrays as in `order_passages`."""
    lengths = np.diff(offsets)
    rows = np.flatnonzero(lengths)
    group = np.zeros(len(rows), dtype=np.int64)
    base = int(codes.max(initial=0)) + 1
    total = 0
    place = 0
    while len(rows):
        at = offsets[rows] + orders[offsets[rows] + place]
        _, firsts, group = np.unique(
            group * base + codes[at], return_index=True, return_inverse=True
        )
        total += int(tokens[at[firsts]].sum(dtype=np.int64))
        place += 1
        goes_on = lengths[rows] > place
        rows, group = rows[goes_on], group[goes_on]
    return total


def _each_once(codes: I64, row_of: I64) -> I64:
    """Numbers of the items, of which no row has one twice: an item that a row repeats is another
    one each time."""
    order = np.lexsort((codes, row_of))
    is_new = np.ones(len(codes), dtype=np.bool_)
    is_new[1:] = (np.diff(codes[order]) != 0) | (np.diff(row_of[order]) != 0)
    begins = np.flatnonzero(is_new)
    times = np.empty(len(codes), dtype=np.int64)
    times[order] = np.arange(len(codes)) - np.repeat(begins, np.diff([*begins, len(codes)]))
    return numbered(codes * (int(times.max(initial=0)) + 1) + times)


def _groups(items: I64, row_of: I64, tokens: I32) -> Iterator[tuple[I64, I64]]:
    """Parts the rows, whose items stand row by row: yields the places of an item in the rows that
    are to begin with it, and those of all else in these rows; at last the places of rows that have
    no item in common, with none to begin with.

    Rows only ever leave, so what an item saves only shrinks: the best of what was computed last is
    looked at again, and is taken where it is the best still.
    """
    own = numbered(items)
    rows = numbered(row_of)
    counts = np.bincount(own)
    by_item = np.argsort(own, kind="stable")
    ends = np.cumsum(counts)
    sizes = tokens[by_item[ends - counts]].astype(np.int64)
    row_ends = np.cumsum(np.bincount(rows))
    row_begins = row_ends - np.bincount(rows)
    is_left = np.ones(len(row_ends), dtype=np.bool_)
    worth = sizes * (counts - 1)
    heap = [(-int(worth[item]), int(item)) for item in np.flatnonzero(worth > 0)]
    heapq.heapify(heap)
    while heap:
        before, item = heapq.heappop(heap)
        now = int(sizes[item]) * (int(counts[item]) - 1)
        if now <= 0:
            continue
        if now < -before:
            heapq.heappush(heap, (-now, item))
            continue
        chosen = by_item[(ends[item - 1] if item else 0) : ends[item]]
        chosen = chosen[is_left[rows[chosen]]]
        gone = rows[chosen]
        is_left[gone] = False
        places = _ranges(row_begins[gone], row_ends[gone])
        np.subtract.at(counts, own[places], 1)
        yield chosen, places[~np.isin(places, chosen)]
    others = np.flatnonzero(is_left[rows])
    yield others[:0], others


def _by_savings(items: I64, row_of: I64, tokens: I32) -> I64:
    """The entries of a few rows, row by row: first what rows share, what saves most before the
    rest, then what they do not share, as it stood."""
    _, firsts, inverse, counts = np.unique(
        items, return_index=True, return_inverse=True, return_counts=True
    )
    saved = tokens[firsts].astype(np.int64) * (counts - 1)
    is_alone = (counts == 1)[inverse]
    tie = np.where(is_alone, np.arange(len(items)), items)
    entries: I64 = np.lexsort((tie, -saved[inverse], is_alone, row_of))
    return entries


def _rank(row_of: I64) -> I64:
    """Of entries that stand row by row, the place of each in its row."""
    is_first = np.ones(len(row_of), dtype=np.bool_)
    is_first[1:] = np.diff(row_of) != 0
    begins = np.flatnonzero(is_first)
    return np.arange(len(row_of)) - np.repeat(begins, np.diff([*begins, len(row_of)]))


def _ranges(begins: I64, ends: I64) -> I64:
    """All numbers of the half-open intervals, one after the other."""
    sizes = ends - begins
    shift = np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
    numbers: I64 = np.arange(int(sizes.sum())) + shift
    return numbers
