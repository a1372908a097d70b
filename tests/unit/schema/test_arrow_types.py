from __future__ import annotations

import json

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix.schema.load import load_schema

CHOICE = "dictionary<values=string, indices=int32, ordered=0>"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "string"),
        ({"type": "boolean"}, "bool"),
        ({"type": "number"}, "double"),
        ({"type": "integer"}, "int64"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "int64"),
        ({"type": "integer", "maximum": 2**63}, "decimal128(38, 0)"),
        ({"type": "integer", "exclusiveMaximum": 2**63}, "int64"),
        ({"type": ["integer", "null"]}, "int64"),
        ({"type": ["integer", "number"]}, "double"),
        ({"type": ["integer", "string"]}, "string"),
        ({"type": "null"}, "null"),
        ({"const": 1}, "int64"),
        ({"const": 2**63}, "decimal128(38, 0)"),
        ({"const": {"a": [1], "b": "x"}}, "struct<a: list<item: int64>, b: string>"),
        ({"enum": ["x", None]}, "string"),
        ({"const": "x"}, "string"),
        ({"enum": ["x", "y"]}, CHOICE),
        ({"enum": ["x", "y", None]}, CHOICE),
        ({"enum": ["x", "y", 1]}, "string"),
        ({"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]}, CHOICE),
        ({"anyOf": [{"enum": ["x", "y"]}, {"type": "string"}]}, "string"),
        ({"anyOf": [{"enum": ["x", "y"]}, {"type": "integer"}]}, "string"),
        ({"oneOf": [{"const": "x"}, {"const": "y"}, {"type": "null"}]}, CHOICE),
        ({"$defs": {"k": {"enum": ["x", "y"]}}, "$ref": "#/$defs/k"}, CHOICE),
        ({"type": "array", "items": {"enum": ["x", "y"]}}, f"list<item: {CHOICE}>"),
        ({"enum": [True, None]}, "bool"),
        ({"enum": [1, 2]}, "int64"),
        ({"enum": [7, "7", None, 7.5]}, "string"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "int64"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "string"),
        ({"type": "array", "items": {"type": "integer"}}, "list<item: int64>"),
        ({"type": "array"}, "list<item: string>"),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "integer"}]},
            "list<item: int64>",
        ),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, "string"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "string"),
        ({"properties": {"a": {}}, "additionalProperties": True}, "string"),
        ({"type": "object"}, "string"),
        (
            {"properties": {"b": {"minimum": 1}, "a": {"minLength": 1}}},
            "struct<b: double, a: string>",
        ),
        ({"allOf": [{"properties": {"a": {"type": "null"}}}]}, "struct<a: null>"),
        ({}, "string"),
    ],
)
def test_the_type_follows_from_the_schema_alone(schema, expected):
    assert str(load_schema(schema).arrow_type) == expected


def test_json_text_is_marked_and_tells_seven_from_its_text_and_null():
    output = load_schema({"properties": {"v": {"enum": [7, "7", None, 7.5]}}, "required": ["v"]})
    answers = [output.parse(json.dumps({"v": v})) for v in (7, "7", None, 7.5)]
    array = output.to_arrow(answers)
    assert [cell["v"] for cell in array.to_pylist()] == ["7", '"7"', "null", "7.5"]
    assert array.type.field("v").metadata == {b"batchradix.encoding": b"json"}
    assert load_schema({}).arrow_field("value").metadata == {b"batchradix.encoding": b"json"}
    assert load_schema({"type": "string"}).arrow_field("value").metadata is None


def test_absent_and_null_properties_are_null():
    output = load_schema({"properties": {"a": {"type": ["string", "null"]}, "b": {}}})
    cells = output.to_arrow([{}, {"a": None, "b": None}, None]).to_pylist()
    assert cells == [{"a": None, "b": None}, {"a": None, "b": "null"}, None]


def test_no_answer_at_all_keeps_the_type():
    output = load_schema({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}})
    array = output.to_arrow([None, None])
    assert array.type == output.arrow_type
    assert array.null_count == 2
    assert len(output.to_arrow([])) == 0


def test_polars_reads_what_arrow_and_parquet_files_hold(tmp_path):
    output = load_schema(
        {
            "properties": {
                "any": {},
                "when": {"type": "string", "format": "date-time"},
                "day": {"type": "string", "format": "date"},
                "at": {"type": "string", "format": "time"},
                "big": {"type": "integer", "maximum": 10**30},
                "nothing": {"type": "null"},
                "kinds": {"type": "array", "items": {"enum": ["a", "b"]}},
                "list": {"type": "array", "items": {"enum": [1, "1"]}},
            }
        }
    )
    text = (
        '{"any":{"x":[1,null]},"when":"2024-01-01T10:00:00Z","day":"2024-02-29",'
        f'"at":"10:00:00Z","big":{10**29},"nothing":null,"kinds":["b","a"],"list":[1,"1"]}}'
    )
    field = output.arrow_field("value")
    table = pa.table([output.to_arrow([output.parse(text), None])], pa.schema([field]))
    pq.write_table(table, tmp_path / "t.parquet")
    with (
        pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as w,
    ):
        w.write_table(table)
    for frame in (pl.read_parquet(tmp_path / "t.parquet"), pl.read_ipc(tmp_path / "t.arrow")):
        cell = frame["value"][0]
        assert cell["any"] == '{"x":[1,null]}'
        assert cell["list"] == ["1", '"1"']
        assert list(cell["kinds"]) == ["b", "a"]
        assert int(cell["big"]) == 10**29
        assert str(cell["day"]) == "2024-02-29"
        assert frame["value"].struct.field("when").dt.hour()[0] == 10
    read = pq.read_table(tmp_path / "t.parquet").schema
    assert read.equals(table.schema)
