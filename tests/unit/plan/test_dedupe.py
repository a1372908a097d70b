from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.plan.dedupe import drop_followers, find_duplicates
from batchradix.plan.order import common_prefixes, make_plan
from batchradix.types import TokenTable

ROW = st.tuples(
    st.lists(st.integers(0, 1), max_size=2), st.integers(0, 1), st.integers(1, 2), st.integers(0, 1)
)


def leaders_of(table, plan, setting, max_tokens, key, greedy):
    return find_duplicates(
        table,
        plan,
        settings_id=np.array(setting, dtype=np.int32),
        max_tokens=np.array(max_tokens, dtype=np.int32),
        rng_key=np.array(key, dtype=np.uint64),
        is_greedy=np.array(greedy, dtype=np.bool_),
    )


@settings(deadline=None, max_examples=300)
@given(st.lists(ROW, max_size=20), st.integers(0, 2**20))
def test_a_row_follows_the_first_row_with_the_same_answer(rows, bits):
    table = TokenTable.from_rows([r[0] for r in rows])
    planned = [r for r in range(len(rows)) if not bits >> r & 1]
    plan = make_plan(table, np.array(planned, dtype=np.int64))
    greedy = [r[1] == 0 for r in rows]
    columns = [[r[i] for r in rows] for i in (1, 2, 3)]
    found = leaders_of(table, plan, *columns, greedy)
    first: dict[object, int] = {}
    expected = list(range(len(rows)))
    for r in planned:
        tokens, setting, most, key = rows[r]
        same = (tuple(tokens), setting, most, None if greedy[r] else key)
        expected[r] = first.setdefault(same, r)
    assert found.tolist() == expected


@settings(deadline=None, max_examples=300)
@given(st.lists(ROW, max_size=20))
def test_dropping_followers_keeps_prefixes_right(rows):
    table = TokenTable.from_rows([r[0] for r in rows])
    plan = make_plan(table)
    columns = [[r[i] for r in rows] for i in (1, 2, 3)]
    leaders = leaders_of(table, plan, *columns, [False] * len(rows))
    kept = drop_followers(plan, leaders)
    assert kept.order.tolist() == [r for r in plan.order if leaders[r] == r]
    assert kept.lcp.tolist() == common_prefixes(table, kept.order).tolist()
    assert kept.lcp.dtype == np.int32


def test_a_dropped_row_hands_on_the_shorter_prefix():
    table = TokenTable.from_rows([[1, 2, 3], [1, 5, 6], [1, 5, 7]])
    plan = make_plan(table)
    kept = drop_followers(plan, np.array([0, 0, 2]))
    assert kept.order.tolist() == [0, 2]
    assert kept.lcp.tolist() == [0, 1]


def test_random_rows_differ_by_their_random_numbers_alone():
    table = TokenTable.from_rows([[1], [1], [1]])
    plan = make_plan(table)
    same = ([0, 0, 0], [5, 5, 5], [2**64 - 1, 2**64 - 2, 2**64 - 1])
    assert leaders_of(table, plan, *same, [False] * 3).tolist() == [0, 1, 0]
    assert leaders_of(table, plan, *same, [True] * 3).tolist() == [0, 0, 0]
