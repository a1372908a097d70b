"""From the two arrays of a `Plan` to its radix tree, without walking over rows.

A node is an interval of plan positions whose rows agree up to a depth at which they branch or
one of them ends. Both ends of every interval are nearest-smaller-value queries over ``lcp``,
answered for all nodes together on a pyramid of minima, level by level.

Positions are taken in blocks from the last to the first, and all nodes that begin in a block are
found at once. Of what lies behind a block only the places matter where ``lcp`` is less than
everywhere between them and the block; these stand for it, and there are no more of them than a
row has tokens. So memory is that of a block, beside the tree itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchradix.scratch import Scratch, windows
from batchradix.types import I64, Plan, PlanTree

BLOCK_ROWS = 1 << 16


def build_tree(
    plan: Plan, lengths: I64, scratch: Scratch | None = None, *, block_rows: int = BLOCK_ROWS
) -> PlanTree:
    """The `PlanTree` of a plan. ``lengths``: int64[num_rows], tokens by table row.

    Rows with equal tokens end at the same node. Rows without tokens end at none:
    ``leaf_of`` is -1 for them. The tree's arrays are made in ``scratch`` (None: in memory);
    beside them memory is O(``block_rows``) and time O(n log n).
    """
    scratch = scratch or Scratch(least_bytes=None)
    nodes = _Nodes(len(plan), scratch)
    behind = _Behind(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    ending_stop = len(plan)  # rows from the block's end up to here end where one before them ends
    for block in reversed(list(windows(len(plan), block_rows))):
        lcp = np.concatenate([plan.lcp[block].astype(np.int64), behind.lcp])
        length = np.asarray(lengths)[plan.order[block]].astype(np.int64)
        ending_stop = _add_block(nodes, block, lcp, length, behind, ending_stop, len(plan))
        places = np.concatenate([np.arange(block.start, block.stop), behind.places])
        lowest = np.flatnonzero(np.diff(np.minimum.accumulate(lcp), prepend=lcp[0] + 1) < 0)
        behind = _Behind(lcp[lowest], places[lowest])
        scratch.let_go()
    return nodes.tree(block_rows)


@dataclass(frozen=True, slots=True)
class _Behind:
    """The places behind a block at which ``lcp`` is less than at all between, and its values."""

    lcp: I64
    places: I64


class _Nodes:
    """Nodes in preorder, filled from the end; there are at most two for each row."""

    def __init__(self, num_rows: int, scratch: Scratch) -> None:
        self._scratch = scratch
        self._begin = 2 * num_rows
        self._first, self._last, self._num_ending = (
            scratch.zeros(2 * num_rows, np.int64) for _ in range(3)
        )
        self._end = scratch.zeros(2 * num_rows, np.int32)
        # While nodes in front of it are still to come, a node is known by its place from the end.
        self.leaf_of = scratch.full(num_rows, -1, np.int64)

    def put(self, first: I64, end: I64, last: I64, num_ending: I64) -> int:
        """Puts nodes in front of those there; the place of the first of them."""
        here = slice(self._begin - len(first), self._begin)
        self._first[here], self._end[here], self._last[here] = first, end, last
        self._num_ending[here] = num_ending
        self._begin = here.start
        return self._begin

    def tree(self, block_rows: int) -> PlanTree:
        first, end = self._first[self._begin :], self._end[self._begin :]
        last, num_ending = self._last[self._begin :], self._num_ending[self._begin :]
        parent = self._scratch.zeros(len(first), np.int64)
        start = self._scratch.zeros(len(first), np.int32)
        above = np.zeros(0, dtype=np.int64)  # nodes before the block that hold its first row
        for block in self._scratch.windows(len(first), block_rows):
            nodes = np.concatenate([above, np.arange(block.start, block.stop)])
            lasts, begins = last[nodes], first[nodes]
            # The nearest node before, in preorder, that has not ended at this position.
            found = _previous_below(
                -lasts, np.arange(len(above), len(nodes)), -begins[len(above) :]
            )
            parent[block] = np.where(found >= 0, nodes[found], -1)
            start[block] = np.where(found >= 0, end[nodes[found]], 0)
            if block.stop < len(first):
                above = nodes[lasts > first[block.stop]]
        for rows in self._scratch.windows(len(self.leaf_of), block_rows):
            leaves = self.leaf_of[rows]
            self.leaf_of[rows] = np.where(leaves >= 0, leaves - self._begin, -1)
        return PlanTree(
            parent=parent,
            start=start,
            end=end,
            first=first,
            last=last,
            num_ending=num_ending,
            leaf_of=self.leaf_of,
        )


def _add_block(
    nodes: _Nodes, block: slice, lcp: I64, length: I64, behind: _Behind, ending_stop: int, n: int
) -> int:
    """Adds the nodes that begin in a block; where the rows stop that end before it at the latest.

    ``lcp``: of the block's positions and then of those behind; ``length``: of the block's.
    """
    size = len(length)
    # A row that equals the one before it ends where that one ends; any other row with tokens
    # has a node of its own, whose first position it is.
    row_first = np.flatnonzero(lcp[:size] < length)
    # Between positions k - 1 and k the rows part at depth lcp[k]. The first such place of an
    # interval stands for it, unless its first row ends at that very depth.
    parts = np.flatnonzero(lcp > 0)
    before = _previous_at_most(lcp, parts)
    parts_first = _previous_below(lcp, parts, lcp[parts])
    inside = (parts_first >= 0) & (parts_first < size)
    parts, before, parts_first = parts[inside], before[inside], parts_first[inside]
    is_branch = (before == parts_first) & (length[parts_first] > lcp[parts])
    first = np.concatenate([row_first, parts_first[is_branch]])
    end = np.concatenate([length[row_first], lcp[parts[is_branch]]])
    last = _next_below(lcp, first + 1, end)
    places = np.concatenate([np.arange(block.start, block.stop), behind.places, [n]])

    stops = np.append(row_first[1:] + block.start, ending_stop)
    num_ending = np.zeros(len(first), dtype=np.int64)
    num_ending[: len(row_first)] = stops - (row_first + block.start)
    preorder = np.lexsort((end, first))
    begin = nodes.put(
        first[preorder] + block.start, end[preorder], places[last[preorder]], num_ending[preorder]
    )
    rank = np.empty(len(preorder), dtype=np.int64)
    rank[preorder] = np.arange(len(preorder))
    if not len(row_first):
        return ending_stop
    leaves = begin + rank[: len(row_first)]
    from_row: int = block.start + int(row_first[0])
    inner = num_ending[: len(row_first)].copy()
    inner[-1] = block.stop - (block.start + int(row_first[-1]))
    nodes.leaf_of[from_row : block.stop] = np.repeat(leaves, inner)
    nodes.leaf_of[block.stop : ending_stop] = leaves[-1]
    return from_row


def flat_tree(plan: Plan, lengths: I64, scratch: Scratch | None = None) -> PlanTree:
    """The tree in which no row shares anything: every row with tokens is a root of its own.

    ``lengths``: int64[num_rows], tokens by table row. The arrays are made in ``scratch`` (None:
    in memory). Used when the prefix cache is off.
    """
    scratch = scratch or Scratch(least_bytes=None)
    # Rows without tokens come first.
    num_empty = 0
    for rows in scratch.windows(len(plan)):
        num_empty += int((np.asarray(lengths)[plan.order[rows]] == 0).sum())
    num_nodes = len(plan) - num_empty
    parent = scratch.full(num_nodes, -1, np.int64)
    leaf_of = scratch.full(len(plan), -1, np.int64)
    first, last = scratch.zeros(num_nodes, np.int64), scratch.zeros(num_nodes, np.int64)
    end = scratch.zeros(num_nodes, np.int32)
    for nodes in scratch.windows(num_nodes):
        numbers = np.arange(nodes.start, nodes.stop)
        leaf_of[numbers + num_empty] = numbers
        first[nodes], last[nodes] = numbers + num_empty, numbers + num_empty + 1
        end[nodes] = np.asarray(lengths)[plan.order[numbers + num_empty]]
    return PlanTree(
        parent=parent,
        start=scratch.zeros(num_nodes, np.int32),
        end=end,
        first=first,
        last=last,
        num_ending=scratch.full(num_nodes, 1, np.int64),
        leaf_of=leaf_of,
    )


def _next_below(values: I64, begin: I64, threshold: I64) -> I64:
    """For each query the first ``j >= begin`` with ``values[j] < threshold``, else ``len``.

    Climbs a pyramid of minima until a block holds such a value, then descends into it: one
    vectorised operation a level, whatever the values.
    """
    lowest = np.iinfo(np.int64).min
    levels = [np.append(values, lowest)]  # the sentinel ends every search at len(values)
    while len(levels[-1]) > 1:
        below = levels[-1]
        if len(below) % 2:
            below = np.append(below, np.iinfo(np.int64).max)
        levels.append(below.reshape(-1, 2).min(axis=1))
    node = begin.astype(np.int64)
    found_at = np.zeros(len(node), dtype=np.int8)
    active = np.arange(len(node))
    for level, minima in enumerate(levels):
        place = node[active]
        hit = minima[place] < threshold[active]
        beside = np.minimum(place + 1, len(minima) - 1)
        hit_beside = ~hit & (place % 2 == 0) & (minima[beside] < threshold[active])
        node[active] = np.where(hit, place, np.where(hit_beside, place + 1, place // 2 + 1))
        done = hit | hit_beside
        found_at[active[done]] = level
        active = active[~done]
    for level in range(len(levels) - 1, 0, -1):
        inside = np.flatnonzero(found_at >= level)
        left = 2 * node[inside]
        node[inside] = left + (levels[level - 1][left] >= threshold[inside])
    return node


def _previous_below(values: I64, at: I64, threshold: I64) -> I64:
    """For each query the last ``j < at`` with ``values[j] < threshold``, else -1."""
    n = len(values)
    return n - 1 - _next_below(values[::-1], n - at, threshold)


def _previous_at_most(values: I64, at: I64) -> I64:
    """For each query the last ``j < at`` with ``values[j] <= values[at]``, else -1."""
    return _previous_below(values, at, values[at] + 1)
