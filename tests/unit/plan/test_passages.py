from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.plan.passages import computed_tokens, order_passages
from batchradix.types import I32, I64

ROWS = st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=30)
SIZES = st.lists(st.integers(1, 30), min_size=7, max_size=7)


def flat(rows: list[list[int]]) -> tuple[I64, I64]:
    offsets = np.cumsum([0, *map(len, rows)])
    return np.array(list(itertools.chain.from_iterable(rows)), dtype=np.int64), offsets


def arranged(rows: list[list[int]], offsets: I64, orders: I32) -> list[list[int]]:
    return [
        [row[place] for place in orders[offsets[i] : offsets[i + 1]]] for i, row in enumerate(rows)
    ]


def beginnings(rows: list[list[int]], sizes: list[int]) -> int:
    found = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    return sum(sizes[begun[-1]] for begun in found)


@settings(deadline=None, max_examples=300)
@given(ROWS, SIZES)
def test_each_row_keeps_its_items_and_tokens_are_those_of_each_distinct_beginning(
    rows: list[list[int]], sizes: list[int]
) -> None:
    codes, offsets = flat(rows)
    tokens = np.array(sizes, dtype=np.int32)[codes]
    orders = order_passages(codes, offsets, tokens)
    for i, row in enumerate(rows):
        assert sorted(orders[offsets[i] : offsets[i + 1]].tolist()) == list(range(len(row)))
    found = arranged(rows, offsets, orders)
    assert computed_tokens(codes, offsets, tokens, orders) == beginnings(found, sizes)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sets(st.integers(0, 6), max_size=5), max_size=30), SIZES, st.randoms())
def test_rows_with_the_same_items_begin_with_those_that_others_share_in_one_order(
    sets: list[set[int]], sizes: list[int], chance: object
) -> None:
    rows = [sorted(one, key=lambda _: chance.random()) for one in sets]  # type: ignore[attr-defined]
    codes, offsets = flat(rows)
    tokens = np.array(sizes, dtype=np.int32)[codes]
    found = arranged(rows, offsets, order_passages(codes, offsets, tokens))
    orders: dict[frozenset[int], list[int]] = {}
    for one, row in zip(sets, found, strict=True):
        first = orders.setdefault(frozenset(one), row)
        assert row == first or sets.count(one) == 1


def test_rows_with_common_passages_in_any_order_share_all_of_them() -> None:
    rows = [list(order) for order in itertools.permutations([0, 1, 2])] * 20
    rows = [[*row[:1], 3 + i, *row[1:]] for i, row in enumerate(rows)]
    codes, offsets = flat(rows)
    tokens = np.full(len(codes), 10, dtype=np.int32)
    orders = order_passages(codes, offsets, tokens)
    # three passages once, and each row's own
    assert computed_tokens(codes, offsets, tokens, orders) == 10 * (3 + len(rows))


def test_what_nobody_shares_stays_as_it_stood() -> None:
    rows = [[5 * i + place for place in (3, 1, 4, 0, 2)] for i in range(40)]
    codes, offsets = flat(rows)
    orders = order_passages(codes, offsets, np.ones(len(codes), dtype=np.int32))
    assert orders.reshape(40, 5).tolist() == [[0, 1, 2, 3, 4]] * 40


def test_the_passage_that_saves_most_leads_though_another_is_in_more_rows() -> None:
    rows = [[0, 1] for _ in range(20)] + [[0, 2 + i] for i in range(10)]
    codes, offsets = flat(rows)
    sizes = np.full(12, 5, dtype=np.int32)
    sizes[1] = 500
    orders = order_passages(codes, offsets, sizes[codes])
    assert orders.reshape(30, 2)[:20].tolist() == [[1, 0]] * 20
    assert orders.reshape(30, 2)[20:].tolist() == [[0, 1]] * 10
