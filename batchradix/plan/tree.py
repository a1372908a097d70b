"""From the two arrays of a `Plan` to its radix tree, without walking over rows.

A node is an interval of plan positions whose rows agree up to a depth at which they branch or
one of them ends. Both ends of every interval are nearest-smaller-value queries over ``lcp``,
answered for all nodes together on a pyramid of minima, level by level.
"""

from __future__ import annotations

import numpy as np

from batchradix.types import I64, Plan, PlanTree


def build_tree(plan: Plan, lengths: I64) -> PlanTree:
    """The `PlanTree` of a plan. ``lengths``: int64[num_rows], tokens by table row.

    Rows with equal tokens end at the same node. Rows without tokens end at none:
    ``leaf_of`` is -1 for them. O(n log n) time, O(n) memory.
    """
    length = np.asarray(lengths, dtype=np.int64)[plan.order]
    lcp = plan.lcp.astype(np.int64)
    # A row that equals the one before it ends where that one ends; any other row with tokens
    # has a node of its own, whose first position it is.
    ends_alone = lcp < length
    row_first = np.flatnonzero(ends_alone)
    # Between positions k - 1 and k the rows part at depth lcp[k]. The first such place of an
    # interval stands for it, unless its first row ends at that very depth.
    parts = np.flatnonzero(lcp > 0)
    before = _previous_at_most(lcp, parts)
    parts_first = _previous_below(lcp, parts, lcp[parts])
    is_branch = (before == parts_first) & (length[parts_first] > lcp[parts])
    first = np.concatenate([row_first, parts_first[is_branch]])
    end = np.concatenate([length[row_first], lcp[parts[is_branch]]])
    last = _next_below(lcp, first + 1, end)

    preorder = np.lexsort((end, first))
    first, end, last = first[preorder], end[preorder], last[preorder]
    row_node = np.empty(len(preorder), dtype=np.int64)
    row_node[preorder] = np.arange(len(preorder))
    row_node = row_node[: len(row_first)]
    leaf_of = _leaves(ends_alone, length, row_node)
    num_ending = np.bincount(leaf_of[leaf_of >= 0], minlength=len(first)).astype(np.int64)
    # The parent is the nearest node before, in preorder, that has not ended at this position.
    parent = _previous_below(-last, np.arange(len(first)), -first)
    start = np.where(parent >= 0, end[parent], 0) if len(first) else end
    return PlanTree(
        parent=parent,
        start=start.astype(np.int32),
        end=end.astype(np.int32),
        first=first,
        last=last,
        num_ending=num_ending,
        leaf_of=leaf_of,
    )


def flat_tree(plan: Plan, lengths: I64) -> PlanTree:
    """The tree in which no row shares anything: every row with tokens is a root of its own.

    ``lengths``: int64[num_rows], tokens by table row. Used when the prefix cache is off.
    """
    length = np.asarray(lengths, dtype=np.int64)[plan.order]
    first = np.flatnonzero(length > 0)
    leaf_of = np.full(len(length), -1, dtype=np.int64)
    leaf_of[first] = np.arange(len(first))
    return PlanTree(
        parent=np.full(len(first), -1, dtype=np.int64),
        start=np.zeros(len(first), dtype=np.int32),
        end=length[first].astype(np.int32),
        first=first,
        last=first + 1,
        num_ending=np.ones(len(first), dtype=np.int64),
        leaf_of=leaf_of,
    )


def _leaves(ends_alone: np.ndarray, length: I64, row_node: I64) -> I64:
    """int64[n]: each position's node, that of the nearest row before it with one of its own."""
    leaf_of = np.full(len(length), -1, dtype=np.int64)
    with_tokens = length > 0
    leaf_of[with_tokens] = row_node[(np.cumsum(ends_alone) - 1)[with_tokens]]
    return leaf_of


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
