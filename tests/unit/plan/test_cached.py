from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.plan import cached as cached_module
from batchradix.plan.cached import demand_tokens, plan_summary, shared_prefix
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.scratch import windows
from batchradix.types import TokenTable

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=7)


def test_shared_prefix_is_by_table_row_and_whole_for_a_repeated_prompt():
    table = TokenTable.from_rows([[7, 8, 9], [], [7, 8, 1], [7, 8, 9]])
    plan = make_plan(table, np.array([0, 2, 3]))
    shared = shared_prefix(plan, len(table))
    assert shared.tolist() == [2, 0, 0, 3]
    assert shared.dtype == np.int32


@settings(deadline=None, max_examples=200)
@given(ROWS, st.integers(1, 3), st.data())
def test_demand_is_the_largest_union_of_paths_plus_the_largest_answers(rows, batch_size, data):
    table = TokenTable.from_rows(rows)
    plan = make_plan(table)
    answers = [data.draw(st.integers(1, 9)) for _ in rows]
    demand = demand_tokens(
        plan, build_tree(plan, table.lengths), np.array(answers, dtype=np.int32), batch_size
    )
    union = max(
        len({tuple(r[:d]) for r in some for d in range(1, len(r) + 1)})
        for some in itertools.combinations(rows, min(batch_size + 1, len(rows)))
    )
    assert demand == union + sum(sorted(answers)[-batch_size:])


def test_demand_without_sharing_adds_whole_prompts():
    table = TokenTable.from_rows([[1, 2, 3], [1, 2], [1, 2, 3, 4]])
    plan = make_plan(table)
    tree = flat_tree(plan, table.lengths)
    answers = np.array([10, 20, 30], dtype=np.int32)
    assert demand_tokens(plan, tree, answers, 1) == 7 + 30
    assert demand_tokens(plan, tree, answers, 64) == 9 + 60


def test_deeply_nested_prompts_have_one_chain():
    table = TokenTable.from_rows([[1] * d for d in range(1, 300)])
    plan = make_plan(table)
    tree = build_tree(plan, table.lengths)
    assert demand_tokens(plan, tree, np.ones(299, dtype=np.int32), 8) == 299 + 8


def test_a_summary_counts_rows_tokens_and_lengths():
    table = TokenTable.from_rows([[1, 2, 3], [], [1, 2], [1, 2, 3]])
    plan = make_plan(table, np.array([0, 2]))
    tree = build_tree(plan, table.lengths)
    summary = plan_summary(table, plan, tree, num_duplicates=1, num_over_long=1)
    assert json.loads(json.dumps(summary.to_json())) == {
        "rows": 4,
        "planned_rows": 2,
        "duplicates": 1,
        "over_long": 1,
        "prompt_tokens": 8,
        "opening_tokens": 0,
        "distinct_tokens": 3,
        "shared_share": 0.625,
        "num_nodes": 2,
        "length_min": 2,
        "length_p50": 3,
        "length_p90": 3,
        "length_p99": 3,
        "length_max": 3,
        "shards": [],
        "memory": None,
        "lint": [],
    }


def test_a_job_without_prompts_has_a_summary_of_zeros():
    table = TokenTable.from_rows([[], []])
    plan = make_plan(table, np.zeros(0, dtype=np.int64))
    summary = plan_summary(table, plan, build_tree(plan, table.lengths), num_rows=5)
    assert (summary.rows, summary.prompt_tokens, summary.shared_share) == (5, 0, 0.0)
    assert demand_tokens(plan, build_tree(plan, table.lengths), np.ones(2, np.int32), 4) == 0


@settings(deadline=None, max_examples=100, derandomize=True)
@given(ROWS, st.integers(1, 3), st.integers(1, 4))
def test_totals_do_not_depend_on_the_windows_they_are_computed_in(rows, batch_size, size):
    table = TokenTable.from_rows(rows)
    plan = make_plan(table)
    tree = build_tree(plan, table.lengths)
    answers = np.arange(1, len(rows) + 1, dtype=np.int32)
    whole = plan_summary(table, plan, tree), demand_tokens(plan, tree, answers, batch_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_module, "windows", lambda num_rows: windows(num_rows, size))
        parts = plan_summary(table, plan, tree), demand_tokens(plan, tree, answers, batch_size)
    assert parts == whole
