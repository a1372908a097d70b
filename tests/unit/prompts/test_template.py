"""Places in templates, and values as text."""

from __future__ import annotations

import datetime
import decimal
import math
import uuid

import pytest

from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.template import Place, parse_template
from batchradix.prompts.values import render_value


def rendered(template, columns=(), schema_text=None, /, **values):
    pieces = parse_template(template, columns, schema_text).pieces(values)
    return "".join(piece.text for piece in pieces)


def problem(template, **values):
    with pytest.raises(RowProblem) as caught:
        parse_template(template, (), None).pieces(values)
    return caught.value.code.value, caught.value.sentence


@pytest.mark.parametrize(
    "template",
    [
        'as {"answer": 1}',
        '{"a": {"b": {}}}',
        "{{",
        "}} {{ {{}} {{ }}",
        "{{ 'x' }}",
        "{{ x | upper }}",
        "{{ x + y }}",
        "{% if x %}",
        "${x} %s {x} {0}",
        "{{\nx\n}}",
        '{{"a": 1}}',
        "{{ x. }} {{ .x }} {{ x..y }}",
    ],
)
def test_what_is_no_place_stays_as_it_is(template):
    assert rendered(template, x="DATA", y="DATA") == template


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{x}}", "X"),
        ("{{ x }}{{x  }}", "XX"),
        ("{{{x}}}", "{X}"),
        ('{"a": {{x}}}', '{"a": X}'),
        ("{{ first name }} {{first-name}}", "F G"),
        ("{{ größe }}", "L"),
        ("{{ info.sku }} {{ info.tags.1 }} {{info.deep.er}}", "s b 5"),
        ("{{ info }}", '{"sku": "s", "tags": ["a", "b"], "deep": {"er": 5}}'),
    ],
)
def test_a_place_shows_its_column(template, expected):
    values = {
        "x": "X",
        "first name": "F",
        "first-name": "G",
        "größe": "L",
        "info": {"sku": "s", "tags": ["a", "b"], "deep": {"er": 5}},
    }
    assert rendered(template, **values) == expected


def test_data_is_never_scanned_for_places():
    assert rendered("{{x}}{{y}}", x="{{y}} {{ schema }} {", y="{x}}") == "{{y}} {{ schema }} {{x}}"


def test_a_column_whose_whole_name_stands_in_braces_comes_first():
    columns = ["a.b", "price ($)", "c.d"]
    values = {"a.b": "flat", "price ($)": "9", "c.d": {"e": "deep"}}
    assert rendered("{{a.b}} {{ price ($) }} {{c.d.e}}", columns, **values) == "flat 9 deep"


def test_the_schema_place_is_the_schema_where_there_is_one_and_else_a_column():
    assert rendered("{{ schema }}", (), '{"type": "x"}', schema="col") == '{"type": "x"}'
    assert rendered("{{ schema }}", schema="col") == "col"


def test_a_missing_field_is_named_and_never_rendered():
    code, sentence = problem("a {{q}}", p=1)
    assert (code, "'q'" in sentence) == ("missing_field", True)
    assert problem("{{q.a}}", q={"b": 1})[0] == "missing_field"
    assert problem("{{q.2}}", q=[1, 2])[0] == "missing_field"
    code, sentence = problem("{{q.a}}", q="text")
    assert (code, "'q' is str" in sentence) == ("missing_field", True)


def test_a_null_field_is_named_and_never_rendered():
    assert problem("{{q}}", q=None)[0] == "null_field"
    code, sentence = problem("{{q.a.b}}", q={"a": None})
    assert code == "null_field"
    assert "'q.a.b'" in sentence
    assert "'q.a' is null" in sentence


def test_an_empty_string_is_a_value():
    assert rendered("Q: {{q}} A", q="") == "Q:  A"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "true"),
        (False, "false"),
        (123456789012345678901234567890, "123456789012345678901234567890"),
        (18446744073709551615, "18446744073709551615"),
        (1.0, "1.0"),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (decimal.Decimal("1.50"), "1.50"),
        (decimal.Decimal("1E+3"), "1000"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        (datetime.datetime(2024, 2, 29, 1, 2, 3), "2024-02-29T01:02:03"),
        (datetime.time(1, 2), "01:02:00"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ({"t": 1}, '{"t": 1}'),
        ({"é": ["ü", None, True, 1.0]}, '{"é": ["ü", null, true, 1.0]}'),
        ([datetime.date(2024, 2, 29), math.nan], '["2024-02-29", NaN]'),
        ({"big": 2**70}, '{"big": 1180591620717411303424}'),
        ([], "[]"),
    ],
)
def test_a_value_has_one_documented_text(value, expected):
    assert render_value(value, "f") == expected


LOOP: list[object] = []
LOOP.append(LOOP)
DEEP: list[object] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [b"x", {"a": b"x"}, object(), {(1, 2): 3}, LOOP, DEEP, 10**5000, [10**5000]],
    ids=["bytes", "inner bytes", "object", "tuple key", "loop", "deep", "huge", "inner huge"],
)
def test_what_has_no_text_is_a_bad_value_that_names_the_field(value):
    with pytest.raises(RowProblem) as caught:
        render_value(value, "photo")
    assert caught.value.code.value == "bad_value"
    assert "'photo'" in caught.value.sentence
    assert len(caught.value.sentence) < 300


def test_places_tell_their_top_level_column():
    template = parse_template("{{ info.sku }}{{q}}", (), None)
    assert template.places == (Place("info", ("sku",)), Place("q"))
