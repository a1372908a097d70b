from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.plan.lint import Fields, Finding, lint


def fields_of(columns: list[tuple[bool, int, list[int]]]) -> Fields:
    """Columns as (is a place, tokens of each text, codes)."""
    num_rows = len(columns[0][2])
    tokens = [[size] * num_rows for _, size, _ in columns]
    return Fields(
        codes=np.array([codes for _, _, codes in columns], dtype=np.int64).T,
        tokens=np.array(tokens, dtype=np.int32).T,
        is_place=np.array([is_place for is_place, _, _ in columns]),
    )


CODES = st.lists(st.integers(0, 3), min_size=6, max_size=6)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), CODES), min_size=1, max_size=4))
def test_tokens_to_compute_are_those_of_each_distinct_beginning(
    columns: list[tuple[bool, int, list[int]]],
) -> None:
    fields = fields_of(columns)
    beginnings = {
        tuple(int(code) for code in row[: end + 1])
        for row in fields.codes
        for end in range(len(columns))
    }
    expected = sum(columns[len(beginning) - 1][1] for beginning in beginnings)
    assert fields.first(range(len(columns))) == expected


def test_a_place_before_an_instruction_costs_the_instruction_again_for_each_value() -> None:
    dates = [0, 0, 1, 1, 2, 2]
    fields = fields_of([(True, 5, dates), (False, 100, [0] * 6), (True, 20, list(range(6)))])
    assert lint(fields) == [Finding(fields=(0,), lost_tokens=2 * 100)]


def test_a_question_before_its_document_is_found_and_not_the_document() -> None:
    documents, questions = [0, 1] * 10, [n // 2 for n in range(20)]
    fields = fields_of([(True, 10, questions), (True, 500, documents)])
    [finding] = lint(fields)
    assert finding.fields == (0,)
    assert finding.lost_tokens == (10 * 10 + 20 * 500) - (2 * 500 + 20 * 10)


def test_places_that_only_cost_something_together_are_told_together() -> None:
    each = list(range(8))
    fields = fields_of([(True, 2, each), (True, 3, each), (False, 50, [0] * 8), (True, 9, each)])
    assert lint(fields) == [Finding(fields=(0, 1), lost_tokens=7 * 50)]


def test_a_template_in_the_best_order_has_no_findings() -> None:
    fields = fields_of(
        [(False, 50, [0] * 6), (True, 9, [0, 0, 0, 1, 1, 1]), (True, 4, [*range(6)])]
    )
    assert lint(fields) == []
    assert lint(fields_of([(True, 5, [])])) == []
    assert lint(fields_of([(True, 9, [*range(6)]), (False, 50, [0] * 6)])) == []  # has to be last


def test_a_place_that_has_nothing_to_do_with_it_is_not_blamed() -> None:
    ids, texts = list(range(50)), list(range(50))
    fields = fields_of(
        [(True, 3, ids), (False, 80, [0] * 50), (True, 40, texts), (False, 1, [0] * 50)]
    )
    [finding] = lint(fields)
    assert finding.fields == (0,)
    assert finding.lost_tokens == 49 * 80
