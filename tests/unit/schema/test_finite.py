"""Schemas that would have to hold themselves without end."""

from __future__ import annotations

from typing import Any

import pytest

from batchradix.errors import SchemaError
from batchradix.schema.output_schema import OutputSchema

NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
TREE = {"type": "object", "properties": {"parts": {"type": "array", "items": {"$ref": "#"}}}}


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"anyOf": [NODE, {"type": "array", "minItems": 2, "items": {"$ref": "#"}}]},
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {**NODE, "properties": {"next": {"$ref": "#/$defs/b"}}},
                "b": {**NODE, "properties": {"next": {"$ref": "#/$defs/a"}}},
            },
        },
    ],
)
@pytest.mark.timeout(20)
def test_a_schema_that_cannot_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"at #.*: its values would have to hold themselves"):
        OutputSchema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        {**TREE, "required": ["parts"]},
        {**NODE, "required": []},
        {**NODE, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {**NODE, "type": ["object", "null"]},
        {"type": "array", "items": {"$ref": "#"}},
    ],
)
def test_one_with_a_way_out_is_not(schema: dict[str, Any]) -> None:
    assert OutputSchema(schema).grammar.source


def test_an_optional_part_that_cannot_end_is_named_by_its_pointer() -> None:
    schema = {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "more": {"$ref": "#/$defs/node"}},
        "required": ["id"],
        "$defs": {"node": {**NODE, "properties": {"next": {"$ref": "#/$defs/node"}}}},
    }
    with pytest.raises(SchemaError, match="at #/properties/more: its values"):
        OutputSchema(schema)


def test_an_alternative_that_cannot_end_is_left_out() -> None:
    node = {**NODE, "properties": {"next": {"$ref": "#/$defs/node"}}}
    schema = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "integer"}], "$defs": {"node": node}}
    found = OutputSchema(schema)
    assert "$ref" not in found.grammar.source
    assert found.parse("3") == 3


def test_an_endless_definition_that_nothing_uses_does_no_harm() -> None:
    node = {**NODE, "properties": {"next": {"$ref": "#/$defs/node"}}}
    assert OutputSchema({"type": "string", "$defs": {"node": node}}).grammar.source
