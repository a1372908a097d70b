"""Schemas that rows bring along."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchradix.errors import SchemaError
from batchradix.schema.arrow_types import holds_json
from batchradix.schema.row_formats import JsonTexts, RowFormats

INTEGER = {"type": "integer"}


def openai(schema: Any) -> dict[str, Any]:
    inner = {"name": "n", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": inner}


@pytest.mark.parametrize("column", ["response_format", "mine"])
def test_a_response_format_is_read_as_object_and_as_text(column: str) -> None:
    reader = RowFormats(column, drops_nulls=False)
    for cell in (openai(INTEGER), json.dumps(openai(INTEGER)), openai(json.dumps(INTEGER))):
        found = reader.read(cell)
        assert found is not None
        assert found.json == INTEGER
    assert reader.read({"type": "text"}) is None
    anything = reader.read({"type": "json_object"})
    assert anything is not None
    assert anything.parse('{"a":[1]}') == {"a": [1]}


def test_a_column_asked_for_holds_schemas_as_they_are() -> None:
    reader = RowFormats("mine", drops_nulls=False)
    for cell in (INTEGER, json.dumps(INTEGER), True):
        found = reader.read(cell)
        assert found is not None
        assert found.parse("7") == 7


def test_equal_cells_share_one_schema_and_its_error() -> None:
    reader = RowFormats("mine", drops_nulls=False)
    assert reader.read(dict(INTEGER)) is reader.read(dict(INTEGER))
    errors = []
    for _ in range(2):
        with pytest.raises(SchemaError) as refused:
            reader.read({"type": "number", "minimum": "x"})
        errors.append(refused.value)
    assert errors[0] is errors[1]


def test_nulls_that_typed_columns_fill_in_are_no_keywords() -> None:
    cell = openai({"type": "integer", "minimum": 1, "pattern": None, "enum": None})
    found = RowFormats("response_format", drops_nulls=True).read(cell)
    assert found is not None
    assert found.json == {"type": "integer", "minimum": 1}


@pytest.mark.parametrize(
    ("column", "cell", "problem"),
    [
        ("response_format", INTEGER, "expected an object whose type is json_schema, json_object"),
        ("response_format", "{", "the text is not JSON"),
        ("response_format", 7, "expected an object whose type is"),
        ("response_format", {"type": "json_schema"}, "no schema at json_schema.schema"),
        ("response_format", openai([1]), "no schema at json_schema.schema"),
        ("mine", 7, "expected an object or its JSON text, not 7"),
        ("mine", b"x", "no JSON"),
        ("mine", {"type": "wrong"}, "wrong"),
    ],
)
def test_what_is_no_schema_is_refused(column: str, cell: Any, problem: str) -> None:
    with pytest.raises(SchemaError, match=problem):
        RowFormats(column, drops_nulls=False).read(cell)


def test_values_of_many_types_are_json_texts() -> None:
    values = JsonTexts()
    assert values.to_arrow([7, "7", {"a": None}, None]).to_pylist() == [
        "7",
        '"7"',
        '{"a":null}',
        None,
    ]
    assert holds_json(values.arrow_field("value"))
