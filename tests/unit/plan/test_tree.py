from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.scratch import Scratch
from batchradix.types import PlanTree, TokenTable

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=25)


def trie_edges(rows: list[list[int]]) -> dict[tuple[int, ...], tuple[int, ...] | None]:
    """Brute force: every node's full token path and that of its parent."""
    prefixes = {tuple(r[:d]) for r in rows for d in range(1, len(r) + 1)}
    ends = {tuple(r) for r in rows if r}

    def children(p: tuple[int, ...]) -> int:
        return sum(len(q) == len(p) + 1 and q[: len(p)] == p for q in prefixes)

    nodes = {p for p in prefixes if p in ends or children(p) != 1}
    return {
        p: next((p[:d] for d in range(len(p) - 1, 0, -1) if p[:d] in nodes), None) for p in nodes
    }


def planned(rows: list[list[int]]):
    table = TokenTable.from_rows(rows)
    plan = make_plan(table)
    return plan, build_tree(plan, table.lengths), [rows[r] for r in plan.order]


def paths(tree: PlanTree, ordered: list[list[int]]) -> list[tuple[int, ...]]:
    return [tuple(ordered[f][:e]) for f, e in zip(tree.first, tree.end, strict=True)]


@settings(deadline=None, max_examples=300)
@given(ROWS)
@example([[], [0], [0], [0, 1], [0, 1, 1], [0, 1, 1], [1]])
@example([[0] * d for d in range(8)])
def test_nodes_and_parents_are_those_of_a_trie(rows):
    _, tree, ordered = planned(rows)
    found = paths(tree, ordered)
    expected = trie_edges(rows)
    assert sorted(found) == sorted(expected)
    assert [None if p < 0 else found[p] for p in tree.parent] == [expected[p] for p in found]
    assert tree.distinct_tokens == len({p[:d] for p in found for d in range(1, len(p) + 1)})


@settings(deadline=None, max_examples=300)
@given(ROWS)
def test_ranges_leaves_and_preorder_agree_with_the_rows(rows):
    plan, tree, ordered = planned(rows)
    found = paths(tree, ordered)
    assert found == sorted(found)  # preorder of a trie is the order of its paths
    for node, path in enumerate(found):
        below = [k for k, r in enumerate(ordered) if tuple(r[: len(path)]) == path]
        assert below == list(range(tree.first[node], tree.last[node]))
        ending = [k for k in below if len(ordered[k]) == len(path)]
        assert ending == below[: tree.num_ending[node]]
        assert len(ending) == tree.num_ending[node]
        parent = tree.parent[node]
        assert tree.start[node] == (tree.end[parent] if parent >= 0 else 0)
        assert parent < node
        assert tree.end[node] > tree.start[node]
    for k, row in enumerate(ordered):
        leaf = tree.leaf_of[k]
        assert found[leaf] == tuple(row) if row else leaf == -1
    assert len(tree.leaf_of) == len(plan)


def test_arrays_have_the_types_that_the_engine_expects():
    _, tree, _ = planned([[1, 2], [1, 3], []])
    kinds = {name: getattr(tree, name).dtype.name for name in PlanTree.__dataclass_fields__}
    assert kinds == {
        "parent": "int64",
        "start": "int32",
        "end": "int32",
        "first": "int64",
        "last": "int64",
        "num_ending": "int64",
        "leaf_of": "int64",
    }


def test_a_big_random_tree_computes_each_distinct_token_once():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 30, 20_000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = TokenTable(rng.integers(0, 2, offsets[-1], dtype=np.uint32), offsets)
    plan = make_plan(table)
    tree = build_tree(plan, table.lengths)
    own = table.lengths[plan.order] - plan.lcp
    assert tree.distinct_tokens == own.sum()
    assert tree.num_ending.sum() == (lengths > 0).sum()


def test_empty_plans_have_empty_trees():
    for rows in ([], [[], []]):
        table = TokenTable.from_rows(rows)
        plan = make_plan(table)
        for tree in (build_tree(plan, table.lengths), flat_tree(plan, table.lengths)):
            assert len(tree) == 0
            assert tree.distinct_tokens == 0
            assert tree.leaf_of.tolist() == [-1] * len(rows)


def test_a_flat_tree_shares_nothing():
    table = TokenTable.from_rows([[1, 2], [], [1], [1, 2]])
    plan = make_plan(table)
    tree = flat_tree(plan, table.lengths)
    assert plan.order.tolist() == [1, 2, 0, 3]
    assert tree.leaf_of.tolist() == [-1, 0, 1, 2]
    assert tree.first.tolist() == [1, 2, 3]
    assert tree.last.tolist() == [2, 3, 4]
    assert tree.end.tolist() == [1, 2, 2]
    assert tree.start.tolist() == [0, 0, 0]
    assert tree.parent.tolist() == [-1, -1, -1]
    assert tree.num_ending.tolist() == [1, 1, 1]
    assert tree.distinct_tokens == table.num_tokens


@settings(deadline=None, max_examples=200, derandomize=True)
@given(ROWS, st.integers(1, 8))
def test_a_tree_is_the_same_whatever_blocks_it_is_built_in(rows, block_rows):
    table = TokenTable.from_rows(rows)
    plan = make_plan(table)
    whole = build_tree(plan, table.lengths)
    blocks = build_tree(plan, table.lengths, Scratch(least_bytes=64), block_rows=block_rows)
    for field in fields(PlanTree):
        here, there = getattr(blocks, field.name), getattr(whole, field.name)
        assert here.dtype == there.dtype
        assert here.tolist() == there.tolist(), field.name
