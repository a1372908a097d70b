"""The curve of what is found by what is kept, against simulated caches."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchradix.plan.memory import MemoryCurve, memory_curve
from batchradix.plan.order import make_plan
from batchradix.types import TokenTable

Prefix = tuple[int, ...]
ROWS = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=20)
FEW_ROWS = st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=4)


def planned(rows: list[list[int]]) -> tuple[MemoryCurve, list[list[int]]]:
    table = TokenTable.from_rows(rows)
    plan = make_plan(table)
    return memory_curve(plan, table.lengths), [rows[row] for row in plan.order]


def prefixes(row: list[int]) -> list[Prefix]:
    return [tuple(row[: end + 1]) for end in range(len(row))]


def found_in(cache: frozenset[Prefix], row: list[int]) -> int:
    found = 0
    for prefix in prefixes(row):
        if prefix not in cache:
            break
        found += 1
    return found


@settings(deadline=None, max_examples=200)
@given(ROWS, st.integers(0, 12))
@example([], 3)
@example([[1, 2]], 0)
def test_a_cache_that_drops_what_was_used_longest_ago_finds_what_the_curve_says(
    rows: list[list[int]], kept: int
) -> None:
    curve, ordered = planned(rows)
    recent: list[Prefix] = []  # the latest first, of one row the shortest
    found = 0
    for row in ordered:
        found += found_in(frozenset(recent), row)
        path = prefixes(row)
        recent = [*path, *(prefix for prefix in recent if prefix not in path)][:kept]
    assert found == curve.found_tokens[min(kept, curve.needed_tokens)]


@settings(deadline=None, max_examples=60)
@given(FEW_ROWS, st.integers(0, 4))
def test_no_choice_of_what_to_keep_finds_more(rows: list[list[int]], kept: int) -> None:
    curve, ordered = planned(rows)
    best: dict[frozenset[Prefix], int] = {frozenset(): 0}
    for row in ordered:
        after: dict[frozenset[Prefix], int] = {}
        for cache, before in best.items():
            found = before + found_in(cache, row)
            there = cache | set(prefixes(row))
            for size in range(min(kept, len(there)) + 1):
                for some in combinations(sorted(there), size):
                    key = frozenset(some)
                    after[key] = max(after.get(key, 0), found)
        best = after
    assert max(best.values()) == curve.found_tokens[min(kept, curve.needed_tokens)]


@settings(deadline=None, max_examples=100)
@given(ROWS)
def test_what_is_needed_is_the_least_that_finds_all(rows: list[list[int]]) -> None:
    curve, ordered = planned(rows)
    distinct = len({prefix for row in ordered for prefix in prefixes(row)})
    total = sum(map(len, rows))
    assert curve.num_tokens == total
    assert curve.found_tokens[-1] == total - distinct
    assert (np.diff(curve.found_tokens) > 0).all()


def test_points_are_powers_of_two_and_the_end() -> None:
    curve, _ = planned([[1] * 5 + [2], [1] * 5 + [3]])
    assert curve.points() == [(1, 1 / 12), (2, 2 / 12), (4, 4 / 12), (5, 5 / 12)]
    assert curve.share(100) == 5 / 12
    assert planned([])[0].points() == []
