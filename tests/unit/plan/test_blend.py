"""Subtrees in another order: the same tree, nothing shared less, prefill and decode mixed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.plan.blend import blend
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree
from batchradix.types import Plan, TokenTable


def common(a, b) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def check_plan(plan: Plan, table: TokenTable) -> None:
    """Every shared prefix is that of the rows, and the tree has no token more than before."""
    for k in range(1, len(plan)):
        assert plan.lcp[k] == common(table[plan.order[k]], table[plan.order[k - 1]])
    before = build_tree(make_plan(table), table.lengths)
    tree = build_tree(plan, table.lengths)
    assert tree.distinct_tokens == before.distinct_tokens
    assert (tree.end > tree.start).all()
    assert (tree.end[tree.leaf_of] == table.lengths[plan.order]).all()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_it_is_a_depth_first_walk_of_the_same_tree(data) -> None:
    rows = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1))
    table = TokenTable.from_rows(rows)
    answers = np.array(
        data.draw(st.lists(st.integers(1, 99), min_size=len(rows), max_size=len(rows)))
    )
    plan = make_plan(table)
    blended = blend(plan, table.lengths, answers.astype(np.int32))
    assert sorted(blended.order) == sorted(plan.order)
    check_plan(blended, table)


def mixed_rows() -> tuple[TokenTable, np.ndarray]:
    """Below a common prefix: 20 long prompts with short answers, 20 the other way round."""
    rows, answers = [], []
    for i in range(40):
        long = i < 20
        rows.append([7, 7, 7, 10 + i] + [5] * (200 if long else 4))
        answers.append(2 if long else 80)
    return TokenTable.from_rows(rows), np.array(answers, dtype=np.int32)


def test_prefill_and_decode_stay_in_proportion() -> None:
    table, answers = mixed_rows()
    plan = make_plan(table)
    blended = blend(plan, table.lengths, answers)
    check_plan(blended, table)

    def most_ahead(p: Plan) -> float:
        decode = np.cumsum(answers[p.order]) / answers.sum()
        prefill = np.cumsum(table.lengths[p.order] - p.lcp)
        return float(np.abs(decode - prefill / prefill[-1]).max())

    assert most_ahead(plan) > 0.8
    assert most_ahead(blended) < 0.1


def test_rows_of_one_kind_keep_their_order() -> None:
    table = TokenTable.from_rows([[1, i, 5, 5] for i in range(2, 50)])
    plan = make_plan(table)
    assert blend(plan, table.lengths, np.full(48, 20, dtype=np.int32)) is plan
