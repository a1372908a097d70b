"""An order of fields for each row, such that rows share more of them.

The greedy group recursion of Liu et al., "Optimizing LLM Queries in Relational Data Analytics
Workloads" (2024). Of all values of all fields the one that saves most when it stands first, for the
rows that have it, goes first there, together with the fields that it determines; then the same
again for these rows and the fields left, and for the other rows. Small groups, and rows in which no
value repeats, take their fields in one order, by what each field would save.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from batchradix.plan.numbering import numbered
from batchradix.types import I8, I32, I64

MAX_FIELDS = 64
_SMALL_GROUP = 8  # rows; fewer are not looked into


def order_fields(codes: I64, tokens: I32) -> I8:
    """int8[n, k]: the fields of each row in the order in which they are to stand.

    ``codes``: int64[n, k], equal in a column for rows of the same text, at least 0 and numbered by
    first appearance; ``tokens``: int32[n, k], of each text. The same for the same arguments.
    """
    num_rows, num_fields = codes.shape
    assert num_fields <= MAX_FIELDS
    orders = np.zeros((num_rows, num_fields), dtype=np.int8)
    if not num_rows or not num_fields:
        return orders
    weights = np.square(tokens.astype(np.int64))
    determined = _determined(codes)
    waiting = [(np.arange(num_rows), np.zeros(0, np.int64), np.arange(num_fields))]
    while waiting:
        rows, front, left = waiting.pop()
        groups = _groups(codes[np.ix_(rows, left)], weights[np.ix_(rows, left)], left, determined)
        for places, chosen in groups:
            here = rows[places]
            begun = np.concatenate([front, chosen])
            rest = left[~np.isin(left, chosen)]
            if len(chosen) and len(rest) > 1 and len(here) > _SMALL_GROUP:
                waiting.append((here, begun, rest))
            else:
                last = _by_savings(codes, weights, here, rest)
                orders[here] = np.concatenate([begun, last]).astype(np.int8)
    return orders


def computed_tokens(codes: I64, tokens: I32, orders: I8) -> int:
    """Tokens of the fields that have to be computed where each row has them in its order: those of
    each distinct beginning once. Arrays as in `order_fields`."""
    num_rows, num_fields = codes.shape
    if not codes.size:
        return 0
    rows = np.arange(num_rows)
    base = int(codes.max()) + 1
    group = np.zeros(num_rows, dtype=np.int64)
    total = 0
    for place in range(num_fields):
        field = orders[:, place].astype(np.int64)
        keys = (group * num_fields + field) * base + codes[rows, field]
        _, firsts, group = np.unique(keys, return_index=True, return_inverse=True)
        total += int(tokens[firsts, field[firsts]].sum(dtype=np.int64))
    return total


def _determined(codes: I64) -> list[list[int]]:
    """For each field the others whose value is the same wherever its own is."""
    num_fields = codes.shape[1]
    counts = [len(np.unique(codes[:, field])) for field in range(num_fields)]
    found: list[list[int]] = []
    for field in range(num_fields):
        _, firsts, inverse = np.unique(codes[:, field], return_index=True, return_inverse=True)
        found.append(
            [
                other
                for other in range(num_fields)
                if other != field
                and counts[other] <= counts[field]
                and np.array_equal(codes[firsts, other][inverse], codes[:, other])
            ]
        )
    return found


def _groups(
    codes: I64, weights: I64, fields: I64, determined: list[list[int]]
) -> Iterator[tuple[I64, I64]]:
    """Parts the rows: yields the places of those that begin with the same fields, and these; at
    last the places of all others, with none.

    Rows only ever leave, so what a value saves only shrinks: the best of what was computed last is
    looked at again, and is taken where it is the best still.
    """
    num_rows, num_fields = codes.shape
    is_left = np.ones(num_rows, dtype=np.bool_)
    own = [numbered(codes[:, column]) for column in range(num_fields)]
    counts = [np.bincount(values) for values in own]
    members = [_Members(values, count) for values, count in zip(own, counts, strict=True)]
    columns = [
        [column, *np.flatnonzero(np.isin(fields, determined[int(fields[column])])).tolist()]
        for column in range(num_fields)
    ]
    saved = []
    heap: list[tuple[int, int, int]] = []
    for column in range(num_fields):
        whole = weights[np.ix_(members[column].firsts, columns[column])].sum(axis=1)
        saved.append(whole)
        worth = whole * (counts[column] - 1)
        values = np.flatnonzero(worth > 0)
        heap += [(-int(worth[value]), column, int(value)) for value in values]
    heapq.heapify(heap)
    while heap:
        worth, column, value = heapq.heappop(heap)
        now = int(saved[column][value]) * (int(counts[column][value]) - 1)
        if now <= 0:
            continue
        if now < -worth:
            heapq.heappush(heap, (-now, column, value))
            continue
        rows = members[column][value]
        rows = rows[is_left[rows]]
        is_left[rows] = False
        for other in range(num_fields):
            np.subtract.at(counts[other], own[other][rows], 1)
        yield rows, fields[columns[column]]
    rest = np.flatnonzero(is_left)
    if len(rest):
        yield rest, fields[:0]


class _Members:
    """The places of each value, ascending. ``counts``: int64[m], how many it has."""

    def __init__(self, values: I64, counts: I64) -> None:
        self._places = np.argsort(values, kind="stable")
        self._ends = np.cumsum(counts)
        self.firsts: I64 = self._places[self._ends - counts]

    def __getitem__(self, value: int) -> I64:
        return self._places[self._ends[value - 1] if value else 0 : self._ends[value]]


def _by_savings(codes: I64, weights: I64, rows: I64, fields: I64) -> I64:
    """The fields in one order for all of the rows: what saves most by standing first comes first;
    of equals, the one that stood first."""
    if len(fields) < 2 or len(rows) < 2:
        return fields
    saved = []
    for field in fields.tolist():
        _, firsts = np.unique(codes[rows, field], return_index=True)
        whole = weights[rows, field]
        saved.append(int(whole.sum()) - int(whole[firsts].sum()))
    return fields[np.argsort(-np.array(saved), kind="stable")]
