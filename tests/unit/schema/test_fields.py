"""The short way to a schema."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.errors import SchemaError
from batchradix.schema.fields import fields_schema
from batchradix.schema.load import load_schema


def test_fields_become_required_properties_in_order() -> None:
    assert fields_schema("vendor: str, total: float?, kind: a|b|c") == {
        "type": "object",
        "properties": {
            "vendor": {"type": "string"},
            "total": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "kind": {"type": "string", "enum": ["a", "b", "c"]},
        },
        "required": ["vendor", "total", "kind"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("kind", "arrow"),
    [
        ("str", "string"),
        ("int?", "int64"),
        ("float", "double"),
        ("bool", "bool"),
        ("date", "date32[day]"),
        ("datetime", "timestamp[us, tz=UTC]"),
        ("time", "time64[us]"),
        ("uuid", "string"),
        ("[int]", "list<item: int64>"),
        ("int[][]?", "list<item: list<item: int64>>"),
        ("{a: int, 'b c': [{d: bool}]}", "struct<a: int64, b c: list<item: struct<d: bool>>>"),
    ],
)
def test_every_type_has_its_arrow_type(kind: str, arrow: str) -> None:
    schema = load_schema(fields_schema(f"x: {kind}"))
    assert str(schema.arrow_type.field("x").type) == arrow
    assert not schema.validated_keywords


def test_quotes_hold_names_and_choices_with_anything_in_them() -> None:
    schema = fields_schema("""'the kind': "a, b" | 'it\\'s' | 'say "x"', only: 'one',""")
    assert schema["properties"] == {
        "the kind": {"type": "string", "enum": ["a, b", "it's", 'say "x"']},
        "only": {"type": "string", "enum": ["one"]},
    }


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("", 1, "a field's name"),
        ("a", 2, "':'"),
        ("a: text", 4, "'text' is no type; the types are str, int,"),
        ("a: str b", 8, "expected ',' or the end, not 'b'"),
        ("a: str, a: int", 9, "'a' is there twice"),
        ("a: [str", 8, "expected ']'"),
        ("a: {b: int", 11, "expected ',' or '}'"),
        ("a: x|x", 6, "'x' is there twice"),
        ("a: 'x", 4, "no end"),
        ("a: ''", 4, "empty"),
        (r"a: '\q'", 4, "escape"),
        ("a: int??", 8, "expected ',' or the end, not '?'"),
        ("a: " + "[" * 60, 53, "too deeply"),
    ],
)
def test_errors_name_their_place(text: str, place: int, problem: str) -> None:
    with pytest.raises(SchemaError, match=rf"^fields: at character {place} of ") as refused:
        fields_schema(text)
    assert problem in str(refused.value)


@given(st.text(alphabet="ab:,|?[]{}'\" str\\", max_size=24))
@settings(derandomize=True, max_examples=400, deadline=None)
def test_any_text_is_a_schema_or_refused(text: str) -> None:
    try:
        schema = fields_schema(text)
    except SchemaError:
        return
    load_schema(schema)
