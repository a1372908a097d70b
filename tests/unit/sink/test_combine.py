"""Answers to parts of a text become one, field by field, whatever order they came in where that
says nothing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pyarrow as pa
import pytest

from batchradix.errors import OptionError
from batchradix.sink.combine import Rules

ENUM = pa.dictionary(pa.int32(), pa.string())
TYPE = pa.struct(
    [
        ("tags", pa.list_(pa.string())),
        ("is_good", pa.bool_()),
        ("kind", ENUM),
        ("name", pa.string()),
        ("maker", pa.struct([("city", pa.string()), ("rank", pa.int64())])),
    ]
)


def answer(**changes: Any) -> dict[str, Any]:
    return {"tags": [], "is_good": None, "kind": None, "name": None, "maker": None} | changes


def test_fields_combine_by_their_types() -> None:
    values = [
        answer(tags=["a", "b"], is_good=True, kind="x", maker={"city": None, "rank": 1}),
        answer(tags=["b", "c"], is_good=False, kind="y", name="N"),
        answer(tags=None, is_good=True, kind="y", name="M", maker={"city": "C", "rank": 2}),
    ]
    assert Rules({}).value(values, None, TYPE) == {
        "tags": ["a", "b", "c"],
        "is_good": True,
        "kind": "y",
        "name": "N",
        "maker": {"city": "C", "rank": 1},
    }
    assert Rules({}).value([answer(), answer()], None, TYPE) == answer()


def test_rules_go_before_types_and_the_one_without_a_field_is_for_all_others() -> None:
    rules = Rules({"": "vote", "tags": "first", "maker.city": "union", "name": "ask"})
    values = [
        answer(tags=["a"], name="N", maker={"city": "C", "rank": 2}),
        answer(tags=["b"], name="N", maker={"city": "D", "rank": 1}),
        answer(tags=["b"], name="N", maker={"city": "C", "rank": 1}),
    ]
    asked = answer(tags=["z"], name="asked", maker=None)
    assert rules.value(values, asked, TYPE) == {
        "tags": ["a"],
        "is_good": None,
        "kind": None,
        "name": "asked",
        "maker": {"city": "C\nD", "rank": 1},
    }


def test_votes_and_unions_do_not_depend_on_the_order_of_the_parts() -> None:
    chance = random.Random(5)
    for _ in range(30):
        votes = [chance.choice([True, False, None]) for _ in range(5)]
        lists = [chance.sample("abcd", chance.randint(0, 4)) for _ in range(4)]
        orders = [chance.sample(votes, len(votes)) for _ in range(6)]
        assert len({Rules({}).value(order, None, pa.bool_()) for order in orders}) == 1
        unions = [
            Rules({}).value(list(order), None, pa.list_(pa.string()))
            for order in itertools.permutations(lists)
        ]
        assert len({tuple(sorted(union)) for union in unions}) == 1
        assert all(len(union) == len(set(union)) for union in unions)


def test_texts_are_joined_unless_a_rule_says_otherwise() -> None:
    texts = ["one", "two", "one"]
    assert Rules({}).text(texts, None) == "one\n\ntwo"
    assert Rules({"": "first"}).text(texts, None) == "one"
    assert Rules({"": "vote"}).text(texts, None) == "one"
    assert Rules({"": "ask"}).text(texts, "asked") == "asked"
    assert Rules({"q": "vote"}).text(["b", "a"], None, "q") == "a"


@pytest.mark.parametrize(
    ("rules", "type_", "told"),
    [
        ({"nope": "first"}, TYPE, "'nope'"),
        ({"maker.nope": "first"}, TYPE, "'maker.nope'"),
        ({"is_good": "union"}, TYPE, "only lists and texts"),
        ({"name": "first"}, None, "'name'"),
    ],
)
def test_rules_that_fit_no_field_are_refused(rules: Any, type_: Any, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        Rules(rules).check(type_)


def test_rules_that_fit_are_taken() -> None:
    Rules({"": "ask", "maker": "vote", "maker.city": "union", "tags": "union"}).check(TYPE)
    Rules({"q": "vote"}).check(None, ["q"])
