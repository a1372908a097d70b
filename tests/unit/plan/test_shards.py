"""Shards of a plan against brute force over all ways to cut it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchradix.plan.order import make_plan
from batchradix.plan.shards import SLACK, PlanShards, split_plan
from batchradix.plan.tree import build_tree
from batchradix.types import I32, Plan, TokenTable

ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.lists(st.integers(0, 1), max_size=3)).map(
        lambda row: [row[0]] * (40 * row[0]) + [row[1]] * (9 * row[1]) + row[2]
    ),
    max_size=11,
)


def split(
    rows: list[list[int]], num_shards: int, answers: int = 5
) -> tuple[Plan, TokenTable, PlanShards]:
    table = TokenTable.from_rows(rows)
    plan = make_plan(table)
    answer_tokens: I32 = np.full(len(rows), answers, dtype=np.int32)
    return plan, table, split_plan(plan, table.lengths, answer_tokens, num_shards)


def distinct(rows: list[list[int]]) -> int:
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def cost(rows: list[list[int]], answers: int = 5) -> float:
    """One token for each prefix and answer token, and a 4096th for each token before it."""
    prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    places = [len(prefix) for prefix in prefixes]
    places += [len(row) + step for row in rows for step in range(1, answers + 1)]
    return sum(1 + (place - 0.5) / 4096 for place in places)


@settings(deadline=None, max_examples=300)
@given(ROWS, st.integers(1, 13))
@example([], 1)
@example([[]], 3)
@example([[1, 2, 3]] * 4, 4)
def test_shards_cover_all_rows_once_and_duplicate_what_they_report(
    rows: list[list[int]], num_shards: int
) -> None:
    plan, _, shards = split(rows, num_shards)
    assert len(shards.cuts) == num_shards + 1
    assert (shards.cuts[0], shards.cuts[-1]) == (0, len(rows))
    assert (np.diff(shards.cuts) >= 0).all()
    parts = [
        [rows[row] for row in plan.order[begin:stop]]
        for begin, stop in zip(shards.cuts[:-1], shards.cuts[1:], strict=True)
    ]
    duplicated = sum(map(distinct, parts)) - distinct(rows)
    assert duplicated == shards.duplicated_tokens.sum()
    assert np.allclose(shards.costs, [cost(part) for part in parts])


@settings(deadline=None, max_examples=300)
@given(ROWS.filter(bool), st.integers(1, 5))
def test_no_shard_costs_noticeably_more_than_in_the_best_split(
    rows: list[list[int]], num_shards: int
) -> None:
    plan, _, shards = split(rows, num_shards)
    ordered = [rows[row] for row in plan.order]
    best = min(
        max(
            cost(ordered[begin:stop])
            for begin, stop in zip((0, *cuts), (*cuts, len(rows)), strict=True)
        )
        for cuts in combinations(range(1, len(rows)), min(num_shards, len(rows)) - 1)
    )
    assert max(shards.costs) <= best * (1 + SLACK) + 1e-3


def test_documents_stay_whole_where_they_can() -> None:
    documents = [[number] * 50 for number in range(8)]
    rows = [[*document, 100 + question] for question in range(5) for document in documents]
    _, _, shards = split(rows, 4)
    assert shards.cuts.tolist() == [0, 10, 20, 30, 40]
    assert shards.duplicated_tokens.tolist() == [0, 0, 0, 0]


def test_a_document_that_all_workers_need_is_counted_with_each() -> None:
    rows = [[*[7] * 500, number, number] for number in range(40)]
    _, _, shards = split(rows, 4)
    assert np.diff(shards.cuts).tolist() == [10, 10, 10, 10]
    assert shards.duplicated_tokens.tolist() == [0, 500, 500, 500]


def test_a_cut_moves_a_little_to_where_it_duplicates_less() -> None:
    group = [[1] * 30 + [number] for number in range(101)]
    rows = [[3, *row] for row in group] + [[4, *row] for row in group[:99]]
    _, _, shards = split(rows, 2)
    assert shards.cuts.tolist() == [0, 101, 200]
    assert shards.duplicated_tokens.tolist() == [0, 0]


def test_a_shard_of_the_tree_computes_its_own_tokens_and_the_path_it_begins_with() -> None:
    random = np.random.default_rng(1)
    rows = [random.integers(0, 2, size=random.integers(1, 12)).tolist() for _ in range(300)]
    plan, table, shards = split(rows, 7)
    trees = []
    for begin, stop in zip(shards.cuts[:-1], shards.cuts[1:], strict=True):
        lcp = plan.lcp[begin:stop].copy()
        lcp[0] = 0
        trees.append(build_tree(Plan(plan.order[begin:stop], lcp), table.lengths))
    whole = build_tree(plan, table.lengths).distinct_tokens
    assert sum(tree.distinct_tokens for tree in trees) == whole + shards.duplicated_tokens.sum()
