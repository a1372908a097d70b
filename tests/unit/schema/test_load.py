from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from batchradix.errors import SchemaError
from batchradix.schema.load import load_schema

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Mood(Enum):
    good = "good"
    bad = "bad"


class Inner(BaseModel):
    mood: Mood
    note: str | None = None


class Review(BaseModel):
    stars: int = Field(ge=1, le=5)
    parts: list[Inner] = []


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_models", None)


def test_a_schema_comes_from_a_file_text_mapping_or_switch(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text("\ufeff" + json.dumps(SCHEMA), "utf-8")
    text = json.dumps(SCHEMA)
    for spec in (path, str(path), text, f"  {text}", SCHEMA):
        schema = load_schema(spec)
        assert schema.json == SCHEMA
        assert schema.text == json.dumps(SCHEMA, separators=(",", ":"))
        assert schema.property_names == ("a",)
    assert load_schema(True).parse("[1]") == [1]


def test_a_pydantic_model_gives_columns_and_checks():
    schema = load_schema(Review)
    assert str(schema.arrow_type) == (
        "struct<stars: int64, parts: list<item: struct<mood: string, note: string>>>"
    )
    value = schema.parse('{"stars":5,"parts":[{"mood":"good","note":null}]}')
    assert Review.model_validate(value).parts[0].mood is Mood.good


def test_a_model_is_found_by_name_in_the_current_folder(in_folder):
    (in_folder / "my_models.py").write_text(
        "from pydantic import BaseModel\nclass Box:\n    class M(BaseModel):\n        x: int\n"
    )
    assert load_schema("my_models:Box.M").property_names == ("x",)
    assert str(in_folder) not in sys.path
    with pytest.raises(SchemaError, match="my_models has no 'N'"):
        load_schema("my_models:N")
    with pytest.raises(SchemaError, match="my_models:Box is no pydantic model"):
        load_schema("my_models:Box")


def test_a_module_that_is_missing_or_broken_is_one_clear_sentence(in_folder):
    with pytest.raises(SchemaError, match="no module 'nowhere_at_all'"):
        load_schema("nowhere_at_all:M")
    (in_folder / "my_models.py").write_text("1 / 0\n")
    with pytest.raises(SchemaError, match="importing my_models failed: ZeroDivisionError"):
        load_schema("my_models:M")


def test_a_missing_or_unreadable_file_is_one_clear_sentence(tmp_path):
    with pytest.raises(SchemaError, match=r"the file .*none\.json does not exist"):
        load_schema(tmp_path / "none.json")
    with pytest.raises(SchemaError, match="cannot be read"):
        load_schema(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"title": "\xe9"}')
    with pytest.raises(SchemaError, match="not UTF-8"):
        load_schema(tmp_path / "latin.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b" 2}', "line 2, column 6"),
        ('{"minimum": NaN}', "NaN"),
        ('{"type": "string", "type": "integer"}', "key 'type' twice"),
        ("{" * 100, "line 1, column 2"),
    ],
)
def test_text_that_is_not_json_says_where(text, message):
    with pytest.raises(SchemaError, match=message):
        load_schema(text)


def test_a_schema_nested_beyond_reason_is_refused():
    schema: dict[str, object] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    with pytest.raises(SchemaError, match="too deeply"):
        load_schema(schema)


def test_a_file_with_a_list_is_no_schema(tmp_path):
    path = tmp_path / "list.json"
    path.write_text("[]")
    with pytest.raises(SchemaError, match="list, but a schema is an object"):
        load_schema(path)


def test_what_is_no_schema_at_all_is_refused():
    for spec in (3, {"default": object()}, int, Path):
        with pytest.raises(SchemaError):
            load_schema(spec)


def in_a(part):
    return {"type": "object", "properties": {"a": part}}


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        (False, "false", ""),
        (in_a(False), "false", "#/properties/a"),
        (in_a({"type": "foo"}), "type", "#/properties/a/type"),
        (in_a({"minLength": -1}), "minLength", "#/properties/a/minLength"),
        (in_a({"pattern": "("}), "pattern", "#/properties/a/pattern"),
        (in_a({"enum": []}), "enum", "#/properties/a"),
        (in_a({"minimum": 3, "maximum": 2}), "minimum 3 is above maximum 2", "#/properties/a"),
        (in_a({"minLength": 3, "maxLength": 2}), "minLength 3", "#/properties/a"),
        (in_a({"type": "array", "minItems": 2, "maxItems": 1}), "minItems", "#/properties/a"),
        (in_a({"type": "integer", "minimum": 1.2, "maximum": 1.8}), "maximum", "#/properties/a"),
        (
            in_a({"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 3}),
            "multipleOf",
            "#/properties/a",
        ),
        (in_a({"type": "number", "exclusiveMinimum": 1, "maximum": 1}), "max", "#/properties/a"),
        (in_a({"type": "string", "enum": [1, 2]}), "enum", "#/properties/a"),
        (in_a({"type": "string", "const": 1}), "const", "#/properties/a"),
        (in_a({"$ref": "#/$defs/none"}), "$ref", "#/properties/a"),
        (in_a({"$ref": "#none"}), "$ref", "#/properties/a"),
        (in_a({"$ref": "https://example.org/s.json"}), "$ref", "#/properties/a"),
        (in_a({"$id": "other", "type": "string"}), "$id", "#/properties/a"),
        (in_a({"$ref": "#/properties/a"}), "$ref", "#/properties/a"),
        (in_a({"allOf": [{"$ref": "#/properties/a"}]}), "$ref", "itself without end"),
        (in_a({"allOf": [{"type": "string"}, {"type": "null"}]}), "type", "#/properties/a"),
        (
            in_a({"type": "string", "anyOf": [{"type": "null"}, {"const": 1}]}),
            "anyOf",
            "#/properties/a",
        ),
        (
            {"type": "object", "required": ["b"], "additionalProperties": False},
            "additionalProperties",
            "#",
        ),
        ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "minItems", "#"),
        ({"$schema": "https://example.org/draft", "type": "string"}, "$schema", "#"),
        (in_a({"const": "\ud800"}), "surrogate", ""),
    ],
)
def test_a_schema_that_cannot_be_met_is_refused_naming_keyword_and_place(schema, keyword, pointer):
    with pytest.raises(SchemaError) as caught:
        load_schema(schema)
    assert keyword in str(caught.value)
    assert pointer in str(caught.value)


def test_an_unsatisfiable_part_where_nothing_has_to_match_is_fine():
    schema = load_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "not": {"required": ["b"], "enum": [1]},
            "$defs": {"unused": False},
        }
    )
    assert schema.parse('{"a":"x"}') == {"a": "x"}


def test_older_drafts_keep_their_meaning():
    seven = "http://json-schema.org/draft-07/schema#"
    pair = load_schema(
        {
            "$schema": seven,
            "type": "array",
            "items": [{"type": "integer"}, {"$ref": "#/definitions/s", "maxLength": 0}],
            "additionalItems": False,
            "definitions": {"s": {"type": "string", "maxLength": 1}},
        }
    )
    assert pair.parse('[1,"a"]') == [1, "a"]  # siblings of $ref do not count before 2019-09
    assert '"maxLength":1' in pair.json_grammar.source
    four = "http://json-schema.org/draft-04/schema#"
    above = load_schema(
        {"$schema": four, "type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 9}
    )
    assert json.loads(above.json_grammar.source) == {"type": "integer", "minimum": 1, "maximum": 9}
