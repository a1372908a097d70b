from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.plan.columns import computed_tokens, order_fields
from batchradix.types import I32, I64

TABLES = st.integers(0, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(0, 3), min_size=width, max_size=width), max_size=30
    ).map(lambda rows: np.array(rows, dtype=np.int64).reshape(len(rows), width))
)


def lengths(codes: I64, of_field: list[int]) -> I32:
    """Tokens of each text: its field's, and one more for each higher code."""
    return (np.array(of_field[: codes.shape[1]]) + codes).astype(np.int32)


def beginnings(codes: I64, tokens: I32, orders: np.ndarray) -> int:
    seen: dict[tuple[tuple[int, int], ...], int] = {}
    for row, order in enumerate(orders.tolist()):
        path: tuple[tuple[int, int], ...] = ()
        for field in order:
            path = (*path, (field, int(codes[row, field])))
            seen[path] = int(tokens[row, field])
    return sum(seen.values())


@settings(deadline=None, max_examples=200)
@given(TABLES, st.lists(st.integers(1, 30), min_size=4, max_size=4))
def test_each_row_has_each_field_once_and_tokens_are_those_of_each_distinct_beginning(
    codes: I64, of_field: list[int]
) -> None:
    tokens = lengths(codes, of_field)
    orders = order_fields(codes, tokens)
    assert orders.shape == codes.shape
    assert (np.sort(orders, axis=1) == np.arange(codes.shape[1])).all()
    assert computed_tokens(codes, tokens, orders) == beginnings(codes, tokens, orders)


@settings(deadline=None, max_examples=100)
@given(TABLES, st.lists(st.integers(1, 30), min_size=4, max_size=4))
def test_rows_that_are_the_same_have_the_same_order(codes: I64, of_field: list[int]) -> None:
    tokens = lengths(codes, of_field)
    orders = order_fields(codes, tokens)
    by_row: dict[bytes, bytes] = {}
    for row, order in zip(codes, orders, strict=True):
        assert by_row.setdefault(row.tobytes(), order.tobytes()) == order.tobytes()


def test_the_value_that_saves_most_leads_its_rows_and_brings_what_it_determines() -> None:
    # 20 rows of 2 films of 10 reviews each; the film's long summary follows from its name.
    film = np.repeat([0, 1], 10)
    review = np.arange(20)
    codes = np.stack([review, film, film], axis=1)
    tokens = np.tile(np.array([40, 3, 200], dtype=np.int32), (20, 1))
    orders = order_fields(codes, tokens)
    assert orders.tolist() in ([[1, 2, 0]] * 20, [[2, 1, 0]] * 20)
    assert computed_tokens(codes, tokens, orders) == 2 * 203 + 20 * 40


def test_groups_of_rows_have_orders_of_their_own() -> None:
    # Half of the rows share a long text in the one field, half in the other.
    each = np.arange(40)
    left = np.where(each < 20, 0, each)
    right = np.where(each < 20, each + 1, 0)
    codes = np.stack([left, right], axis=1)
    tokens = np.full((40, 2), 50, dtype=np.int32)
    orders = order_fields(codes, tokens)
    assert orders[:20].tolist() == [[0, 1]] * 20
    assert orders[20:].tolist() == [[1, 0]] * 20
    assert computed_tokens(codes, tokens, orders) == 2 * (50 + 20 * 50)
    as_written = np.tile(np.arange(2, dtype=np.int8), (40, 1))
    assert computed_tokens(codes, tokens, as_written) == 50 + 20 * 50 + 20 * 100


def test_below_a_value_the_rows_are_parted_again() -> None:
    outer, inner = np.repeat(np.arange(3), 40), np.tile(np.repeat(np.arange(4), 10), 3)
    codes = np.stack([np.arange(120), inner, outer], axis=1)
    tokens = np.tile(np.array([5, 20, 90], dtype=np.int32), (120, 1))
    orders = order_fields(codes, tokens)
    assert orders.tolist() == [[2, 1, 0]] * 120
    assert computed_tokens(codes, tokens, orders) == 3 * 90 + 12 * 20 + 120 * 5
