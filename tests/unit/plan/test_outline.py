"""The outline of a tree against brute force over its rows."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchradix.plan.order import make_plan
from batchradix.plan.outline import TreeOutline, outline_tree
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.types import Plan, PlanTree, TokenTable

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=25)


def planned(rows: list[list[int]]) -> tuple[Plan, PlanTree, TokenTable, list[list[int]]]:
    table = TokenTable.from_rows(rows)
    plan = make_plan(table)
    return plan, build_tree(plan, table.lengths), table, [rows[r] for r in plan.order]


def drawn(outline: TreeOutline, piece: int, ordered: list[list[int]]) -> set[tuple[int, int]]:
    """The places (plan position, token depth) that a piece stands for."""
    rows = range(outline.first[piece], outline.last[piece])
    start = int(outline.start[piece])
    if outline.node[piece] < 0:
        return {(k, d) for k in rows for d in range(start, len(ordered[k]))}
    size = int(outline.distinct_tokens[piece])
    return {(k, d) for k in rows for d in range(start, start + size)}


@settings(deadline=None, max_examples=200)
@given(ROWS, st.integers(0, 30))
@example([[0, 1], [0, 1, 2], [0, 2], [1]], 2)
@example([[]], 1)
@example([], 3)
def test_the_pieces_cover_every_token_of_every_row_once(
    rows: list[list[int]], num_kept: int
) -> None:
    plan, tree, table, ordered = planned(rows)
    outline = outline_tree(plan, tree, table.lengths, num_kept=num_kept)
    covered: set[tuple[int, int]] = set()
    for piece in range(len(outline.first)):
        places = drawn(outline, piece, ordered)
        assert len(places) == outline.planned_tokens[piece]
        prefixes = {tuple(ordered[k][: d + 1]) for k, d in places}
        assert len(prefixes) == outline.distinct_tokens[piece]
        assert covered.isdisjoint(places)
        covered |= places
    assert covered == {(k, d) for k, row in enumerate(ordered) for d in range(len(row))}
    assert outline.distinct_tokens.sum() == tree.distinct_tokens
    assert outline.num_nodes.sum() == len(tree)


@settings(deadline=None, max_examples=100)
@given(ROWS, st.integers(0, 30))
def test_the_nodes_kept_are_the_heaviest_and_hang_together(
    rows: list[list[int]], num_kept: int
) -> None:
    plan, tree, table, ordered = planned(rows)
    outline = outline_tree(plan, tree, table.lengths, num_kept=num_kept)
    kept = [int(node) for node in outline.node if node >= 0]
    assert len(kept) == min(num_kept, len(tree))
    assert len(outline.node) <= 3 * num_kept + 1
    assert all(tree.parent[node] in (-1, *kept) for node in kept)
    weight = [
        sum(len(ordered[k]) - int(tree.start[m]) for k in range(tree.first[m], tree.last[m]))
        for m in range(len(tree))
    ]
    others = [w for m, w in enumerate(weight) if m not in kept]
    assert not others or not kept or min(weight[m] for m in kept) >= max(others)


@settings(deadline=None, max_examples=100)
@given(ROWS, st.integers(1, 30))
def test_the_bins_say_what_no_row_before_shares(rows: list[list[int]], num_bins: int) -> None:
    plan, tree, table, ordered = planned(rows)
    outline = outline_tree(plan, tree, table.lengths, num_bins=num_bins)
    size = len(outline.bin_planned_tokens)
    assert size == min(num_bins, len(plan))
    fresh = [len(row) - int(lcp) for row, lcp in zip(ordered, plan.lcp, strict=True)]
    for k in range(size):
        part = slice(k * len(plan) // size, (k + 1) * len(plan) // size)
        assert outline.bin_planned_tokens[k] == sum(map(len, ordered[part]))
        assert outline.bin_distinct_tokens[k] == sum(fresh[part])


def test_nodes_too_narrow_to_be_seen_are_summed_up() -> None:
    rows = [[1, *divmod(i, 64)] for i in range(4096)]
    plan, tree, table, _ = planned(rows)
    outline = outline_tree(plan, tree, table.lengths)
    # 64 nodes of 64 rows are wide enough, a row alone is not.
    assert int((outline.node >= 0).sum()) == 1 + 64
    assert outline.num_nodes.tolist() == [1, *[1, 64] * 64]


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    plan, _, table, _ = planned([[1, 2, 3], [1, 2, 4], []])
    outline = outline_tree(plan, flat_tree(plan, table.lengths), table.lengths, num_kept=1)
    assert outline.planned_tokens.tolist() == outline.distinct_tokens.tolist() == [3, 3]
    assert np.array_equal(outline.bin_planned_tokens, outline.bin_distinct_tokens)
