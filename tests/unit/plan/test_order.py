from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.plan import order as order_module
from batchradix.plan.order import make_plan
from batchradix.scratch import Scratch
from batchradix.types import TokenTable

TOKENS = st.sampled_from([0, 1, 2, 255, 256, 65536, 2**32 - 1])
ROWS = st.lists(st.lists(TOKENS, max_size=40), max_size=30)


@pytest.fixture(autouse=True, scope="module", params=["by Python", "by Polars"])
def few_rows(request):
    """Tables as small as those here are sorted by Python, unless they are told not to be."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "by Polars":
            patch.setattr(order_module, "FEW_ROWS", 0)
        yield


def shared(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


@settings(deadline=None)
@given(ROWS)
def test_rows_come_in_lexicographic_order_and_equal_rows_by_number(rows):
    plan = make_plan(TokenTable.from_rows(rows))
    assert plan.order.tolist() == sorted(range(len(rows)), key=lambda r: (rows[r], r))
    assert plan.order.dtype == np.int64
    assert plan.lcp.dtype == np.int32


@settings(deadline=None)
@given(ROWS, st.sampled_from([(1, 1), (16, 1024), (2, 4)]))
def test_lcp_is_what_each_row_shares_with_the_row_before(rows, windows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "_FIRST_WINDOW", windows[0])
        patch.setattr(order_module, "_LAST_WINDOW", windows[1])
        patch.setattr(order_module, "_BLOCK_TOKENS", 64)
        plan = make_plan(TokenTable.from_rows(rows))
    ordered = [rows[r] for r in plan.order]
    expected = [0] + [shared(a, b) for a, b in itertools.pairwise(ordered)]
    assert plan.lcp.tolist() == expected[: len(rows)]


@settings(deadline=None)
@given(ROWS, st.integers(0, 2**30))
def test_a_plan_of_some_rows_holds_those_rows_alone(rows, bits):
    chosen = [r for r in range(len(rows)) if bits >> r & 1]
    plan = make_plan(TokenTable.from_rows(rows), np.array(chosen[::-1], dtype=np.int64))
    assert plan.order.tolist() == sorted(chosen, key=lambda r: (rows[r], r))
    ordered = [rows[r] for r in plan.order]
    assert plan.lcp[1:].tolist() == [shared(a, b) for a, b in itertools.pairwise(ordered)]


def test_tables_of_several_chunks_sort_like_one(monkeypatch):
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 3, rng.integers(0, 12)).tolist() for _ in range(200)]
    table = TokenTable.from_rows(rows)
    whole = make_plan(table)
    monkeypatch.setattr(order_module, "_CHUNK_TOKENS", 7)  # less than some rows
    parts = make_plan(table)
    assert parts.order.tolist() == whole.order.tolist()
    assert parts.lcp.tolist() == whole.lcp.tolist()


def test_a_long_shared_prefix_is_measured_past_every_window():
    prefix = np.arange(5000) % 97
    rows = [np.append(prefix, [k]) for k in range(20)] + [prefix]
    plan = make_plan(TokenTable.from_rows(rows))
    assert plan.order.tolist() == [20, *range(20)]
    assert plan.lcp.tolist() == [0] + [5000] * 20


def test_a_memory_mapped_table_is_planned_without_being_written(tmp_path):
    path = tmp_path / "values"
    np.array([5, 6, 5, 6, 7], dtype=np.uint32).tofile(path)
    values = np.memmap(path, dtype=np.uint32, mode="r")
    plan = make_plan(TokenTable(values, np.array([0, 2, 5], dtype=np.int64)))
    assert plan.order.tolist() == [0, 1]
    assert plan.lcp.tolist() == [0, 2]


def test_no_rows_make_an_empty_plan():
    assert len(make_plan(TokenTable.from_rows([]))) == 0
    assert len(make_plan(TokenTable.from_rows([[1]]), np.zeros(0, dtype=np.int64))) == 0
    assert make_plan(TokenTable.from_rows([[], [], []])).order.tolist() == [0, 1, 2]


@settings(deadline=None, max_examples=150, derandomize=True)
@given(ROWS, st.integers(1, 4000), st.data())
def test_sorting_in_ranges_gives_the_order_of_sorting_in_memory(rows, memory_bytes, data):
    table = TokenTable.from_rows(rows)
    chosen = None
    if data.draw(st.booleans()):
        chosen = np.array([r for r in range(len(rows)) if data.draw(st.booleans())], dtype=np.int64)
    whole = make_plan(table, chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "_FEWEST_ROWS", 2)
        parts = make_plan(table, chosen, memory_bytes=memory_bytes, scratch=Scratch(least_bytes=64))
    assert parts.order.tolist() == whole.order.tolist()
    assert parts.lcp.tolist() == whole.lcp.tolist()


def test_a_table_of_equal_rows_is_sorted_however_little_memory_there_is(monkeypatch):
    sorts = []
    sort = order_module._sorted_rows
    monkeypatch.setattr(
        order_module, "_sorted_rows", lambda t, rows, s: sorts.append(len(rows)) or sort(t, rows, s)
    )
    plan = make_plan(TokenTable.from_rows([[1, 2]] * 5000), memory_bytes=1000)
    assert plan.order.tolist() == list(range(5000))
    assert max(sorts) < 5000


def test_no_more_rows_are_sorted_at_once_than_fit_the_memory(monkeypatch):
    random = np.random.default_rng(3)
    table = TokenTable(
        random.integers(9, size=80_000).astype(np.uint32), np.arange(20_001, dtype=np.int64) * 4
    )
    sorts = []
    sort = order_module._sorted_rows
    monkeypatch.setattr(
        order_module, "_sorted_rows", lambda t, rows, s: sorts.append(len(rows)) or sort(t, rows, s)
    )
    row_bytes = order_module._SORT_ROW_BYTES + 4 * order_module._SORT_TOKEN_BYTES
    plan = make_plan(table, memory_bytes=row_bytes * 2000)
    assert plan.order.tolist() == make_plan(table).order.tolist()
    assert max(sorts[:-1]) <= 2000
