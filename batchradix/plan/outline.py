"""A tree of millions of nodes as a few hundred rectangles: what of it can be seen in a picture.

Drawn with rows to the right and token depth downwards, a node is a rectangle whose area is what
its tokens would cost without sharing, and its height what they cost with it. Nodes with the most
tokens at and below them are kept, as far as they are wide enough to be seen; between them, what is
left out is summed up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchradix.scratch import Scratch, windows
from batchradix.types import I64, Plan, PlanTree

DEFAULT_NUM_KEPT = 800
DEFAULT_NUM_BINS = 256
_MOST_ACROSS = 2000  # nodes of fewer rows than one in so many cannot be told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOutline:
    """Pieces of a tree, all arrays int64[k], and shares over the plan, int64[b].

    Piece ``i`` covers the plan positions ``[first[i], last[i])`` and begins at token depth
    ``start[i]``. It is the node ``node[i]``, or, with -1 there, all that lies below the piece
    above it at these positions. ``num_nodes`` counts the tree's nodes in it, ``planned_tokens``
    are its tokens once for every row, ``distinct_tokens`` once for all.

    The plan is cut into ``b`` bins of (nearly) as many rows each: rows ``[k * n // b, (k + 1) *
    n // b)`` have ``bin_planned_tokens[k]`` tokens, of which ``bin_distinct_tokens[k]`` are not
    shared with any row before.
    """

    first: I64
    last: I64
    start: I64
    node: I64
    num_nodes: I64
    planned_tokens: I64
    distinct_tokens: I64
    bin_planned_tokens: I64
    bin_distinct_tokens: I64


def outline_tree(
    plan: Plan,
    tree: PlanTree,
    lengths: I64,
    *,
    num_kept: int = DEFAULT_NUM_KEPT,
    num_bins: int = DEFAULT_NUM_BINS,
    scratch: Scratch | None = None,
) -> TreeOutline:
    """The outline of a tree with its ``num_kept`` heaviest nodes at most, in preorder.

    ``lengths``: int64[num_rows], tokens by table row. There are at most ``3 * num_kept + 1``
    pieces. Arrays of a value a row or node are made in ``scratch`` (None: in memory).
    """
    scratch = scratch or Scratch(least_bytes=None)
    sums = _Sums(plan, tree, lengths, scratch)
    pieces: list[tuple[int, ...]] = []
    stack = [_Open(node=-1, last=len(plan), depth=0, done=0)]

    def close() -> None:
        closed = stack.pop()
        _add_rest(pieces, closed, closed.last, sums)
        if stack:
            stack[-1].done = closed.last

    for node in _heaviest(tree, sums, num_kept).tolist():
        first, last = int(tree.first[node]), int(tree.last[node])
        start, end = int(tree.start[node]), int(tree.end[node])
        while stack[-1].last <= first:
            close()
        _add_rest(pieces, stack[-1], first, sums)
        pieces.append((first, last, start, node, 1, (end - start) * (last - first), end - start))
        ended = first + int(tree.num_ending[node])
        stack.append(_Open(node=node, last=last, depth=end, done=ended))
    while stack:
        close()
    columns = np.array(pieces, dtype=np.int64).reshape(len(pieces), 7).T
    num_bins = min(num_bins, len(plan))
    cuts = np.arange(num_bins + 1, dtype=np.int64) * len(plan) // max(1, num_bins)
    return TreeOutline(
        first=columns[0],
        last=columns[1],
        start=columns[2],
        node=columns[3],
        num_nodes=columns[4],
        planned_tokens=columns[5],
        distinct_tokens=columns[6],
        bin_planned_tokens=np.diff(sums.planned[cuts]),
        bin_distinct_tokens=np.diff(sums.distinct[np.searchsorted(tree.first, cuts)]),
    )


class _Sums:
    """``planned``: int64[n + 1], tokens of the rows before a plan position; ``distinct``:
    int64[m + 1], tokens of the nodes before a node. ``first`` is the tree's, ascending."""

    def __init__(self, plan: Plan, tree: PlanTree, lengths: I64, scratch: Scratch) -> None:
        self.first = tree.first
        self.planned: I64 = scratch.zeros(len(plan) + 1, np.int64)
        for part in scratch.windows(len(plan)):
            some = np.asarray(lengths)[plan.order[part]]
            _add_up(self.planned, part, some.astype(np.int64))
        self.distinct: I64 = scratch.zeros(len(tree) + 1, np.int64)
        for part in scratch.windows(len(tree)):
            _add_up(self.distinct, part, tree.end[part].astype(np.int64) - tree.start[part])

    def below(self, first: int, last: int, depth: int) -> int:
        """Tokens of the rows ``[first, last)`` behind ``depth``, once for every row."""
        return int(self.planned[last] - self.planned[first]) - depth * (last - first)


def _add_up(sums: I64, part: slice, values: I64) -> None:
    sums[part.start + 1 : part.stop + 1] = sums[part.start] + np.cumsum(values)


def _heaviest(tree: PlanTree, sums: _Sums, num_kept: int) -> I64:
    """The nodes with the most tokens at and below them, ascending; with a node the one above it."""
    found = np.zeros(0, dtype=np.int64)
    weights = np.zeros(0, dtype=np.int64)
    least_rows = len(sums.planned) // _MOST_ACROSS
    for part in windows(len(tree)):
        wide = part.start + np.flatnonzero(tree.last[part] - tree.first[part] >= least_rows)
        first, last = tree.first[wide], tree.last[wide]
        here = sums.planned[last] - sums.planned[first] - tree.start[wide] * (last - first)
        found = np.concatenate([found, wide])
        weights = np.concatenate([weights, here])
        # A node weighs less than the one above it, which of equals comes first.
        order = np.argsort(-weights, kind="stable")[:num_kept]
        found, weights = found[order], weights[order]
    return np.sort(found)


@dataclass(slots=True, kw_only=True)
class _Open:
    """A kept node (-1: the whole plan) whose rows before ``done`` are accounted for."""

    node: int
    last: int
    depth: int
    done: int


def _add_rest(pieces: list[tuple[int, ...]], above: _Open, stop: int, sums: _Sums) -> None:
    """Sums up what is below an open node at the positions from where it was done to ``stop``."""
    start = above.done
    above.done = stop
    if stop <= start:
        return
    # The first node that begins there may be the open one, or one above it.
    begin = max(above.node + 1, int(np.searchsorted(sums.first, start)))
    end = max(begin, int(np.searchsorted(sums.first, stop)))
    distinct = int(sums.distinct[end] - sums.distinct[begin])
    planned = sums.below(start, stop, above.depth)
    if planned:
        pieces.append((start, stop, above.depth, -1, end - begin, planned, distinct))
