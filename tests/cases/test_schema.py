"""Output schemas against models that want to break them: a row is ok only if it is valid."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

ADVERSARIES = {
    "letters": "a",
    "quotes": '"',
    "brackets": "}]",
    "escapes": "\\u0",
    "numbers": "9.e-",
    "blanks": " \n\t",
}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _is_valid(value: Any, schema: Any) -> bool:
    checker = Draft202012Validator.FORMAT_CHECKER
    return bool(Draft202012Validator(schema, format_checker=checker).is_valid(value))


def test_a_pattern_with_a_length_is_both(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("sc-01")
    ran = cli("run", "jobs.jsonl", "--schema", "schema.json", "--model", const("a"),
              "--max-tokens", 64, "-o", "out.jsonl")  # fmt: skip
    assert ran.code == 0
    assert files.column("out.jsonl", "value") == [{"code": "aaaaa"}] * 2


def test_properties_beside_a_union_are_both(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("sc-03")
    schema = json.loads(Path("schema.json").read_text("utf-8"))
    for number, prefer in enumerate(ADVERSARIES.values()):
        cli("run", "jobs.jsonl", "--schema", "schema.json", "--model", const(prefer),
            "--max-tokens", 64, "-o", f"{number}.jsonl")  # fmt: skip
        for row in files.read_rows(f"{number}.jsonl"):
            assert row["status"] == "ok"
            assert _is_valid(row["value"], schema)
            assert row["value"].keys() & {"email", "phone"}


def test_odd_constants_come_out_character_for_character_in_every_format(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("sc-05")
    properties = json.loads(Path("schema.json").read_text("utf-8"))["properties"]
    expected = [(name, constant["const"]) for name, constant in properties.items()]
    assert dict(expected)["nfd"] == "e\u0301"
    model = const("\\", context_length=1024)
    for ending in ("arrow", "parquet", "jsonl"):
        ran = cli("run", "jobs.jsonl", "--schema", "schema.json", "--model", model,
                  "--max-tokens", 400, "-o", f"out.{ending}")  # fmt: skip
        assert ran.code == 0
        for row in files.read_rows(f"out.{ending}"):
            assert row["status"] == "ok"
            assert list(row["value"].items()) == expected  # in the schema's order
            assert row["completion_tokens"] < 260
            assert json.loads(row["text"]) == dict(expected)


def test_blanks_between_tokens_are_not_written_and_those_in_strings_stay(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("sc-07")
    ran = cli("run", "jobs.jsonl", "--schema", "schema.json", "--model", const(' \n\t,}"7'),
              "--max-tokens", 64, "-o", "out.jsonl")  # fmt: skip
    assert ran.code == 0
    for row in files.read_rows("out.jsonl"):
        assert row["value"] == {"a": 7, "b": "   "}
        assert row["finish_reason"] == "stop"
        assert row["completion_tokens"] <= 24


def test_an_enumeration_of_twenty_thousand_compiles_once_and_quickly(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    """Case sc-09."""
    codes = [f"SKU-{i:05}" for i in range(20_000)] + [f"SKU-{i:04}" for i in range(0, 10_000, 7)]
    files.write_json("schema.json", _object(sku={"enum": codes}))
    files.write_jsonl("jobs.jsonl", [{"id": f"k{i}", "prompt": f"row {i}"} for i in range(64)])
    options = ["--schema", "schema.json", "--model", const("9876543210"), "--max-tokens", 64]
    started_s = time.monotonic()
    assert cli("run", "jobs.jsonl", *options, "-o", "out.jsonl").code == 0
    assert time.monotonic() - started_s < 60
    rows = files.read_rows("out.jsonl")
    assert [row["id"] for row in rows] == [f"k{i}" for i in range(64)]
    assert {row["value"]["sku"] for row in rows} == {"SKU-9996"}
    codes[codes.index("SKU-9996")] = "SKU-9997"  # one value changed: no grammar is reused
    files.write_json("schema.json", _object(sku={"enum": codes}))
    assert cli("run", "jobs.jsonl", *options, "-o", "changed.jsonl").code == 0
    assert {row["value"]["sku"] for row in files.read_rows("changed.jsonl")} == {"SKU-9997"}


class _Colour(Enum):
    RED = "red"
    BLUE = "blue"


class _Address(BaseModel):
    street: str = Field(max_length=4)
    zip_code: int | None = Field(None, ge=0, le=99)


class _Person(BaseModel):
    name: str = Field(min_length=1, max_length=3)
    address: _Address
    others: list[_Address] = Field(max_length=1)
    colour: _Colour
    kind: Literal["a", "b", 3]
    either: int | bool
    maybe: Literal["x"] | None = None
    flag: bool = False


SCHEMAS: dict[str, Any] = {
    "a pydantic model": _Person.model_json_schema(),
    "an array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "a string": {"type": "string", "minLength": 2, "maxLength": 3},
    "an integer": {"type": "integer", "minimum": -5, "exclusiveMaximum": 5},
    "a number": {"type": "number", "minimum": 0, "maximum": 1},
    "null": {"type": "null"},
    "a mixed enumeration": {"enum": [1, 2.5, True, None, "x", ["y"], {"z": 0}]},
    "a constant object": {"const": {"a": [1, {"b": None}], "ü": ""}},
    "a list of types": {"type": ["string", "null", "boolean"], "maxLength": 2},
    "an enumeration with a type": {"type": "string", "enum": ["a", 1, None, "b"]},
    "odd names": _object(
        **{
            name: {"type": "boolean"}
            for name in ("naïve ü", "", 'q"uo\\te', "a.b", "北", "n\nl", "status", "a b")
        }
    ),
    "a multiple": _object(n={"type": "integer", "minimum": -4, "maximum": 4, "multipleOf": 3}),
    "a date": _object(d={"type": "string", "format": "date"}),
    "a moment": {"type": "string", "format": "date-time"},
    "a time": _object(t={"type": "string", "format": "time"}),
    "an optional end": {"type": "string", "pattern": "^[0-9]{2}(-[0-9]{1,3})?(/x{2,})?$",
                        "maxLength": 9},
    "an even length": {"type": "string", "pattern": "^(x?y)*(ab){1,9}$", "maxLength": 5},
    "a tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}, {"const": "z"}],
        "items": False,
        "minItems": 2,
    },
    "itself": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _object(
                v={"enum": ["a"]},
                next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            )
        },
    },
    "all of two": {
        "allOf": [_object(a={"const": 1}) | {"additionalProperties": True}, {"required": ["b"]}],
        "properties": {"b": {"const": 2}},
    },
    "one of two that overlap": {
        "oneOf": [
            {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 9},
            {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 9},
        ]
    },
    "a condition": _object(a={"enum": [1, 2]})
    | {
        "properties": {"a": {"enum": [1, 2]}, "b": {"const": 1}},
        "if": {"properties": {"a": {"const": 1}}},
        "then": {"required": ["b"]},
    },
    "unique items": {
        "type": "array",
        "items": {"enum": ["a", "b", "c"]},
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 2,
    },
    "what it is not": {"not": {"type": ["string", "number", "array", "object"]}},
    "a contained item": {
        "type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "maxItems": 2,
    },
    "a dependency": _object()
    | {
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "dependentRequired": {"a": ["b"]},
    },
    "an unanchored pattern": {"type": "string", "pattern": "b", "maxLength": 3},
    "a pattern of nested repeats": {"type": "string", "pattern": "^(a+)+$", "maxLength": 3},
    "objects or null in a list": {
        "type": "array",
        "items": {"anyOf": [_object(x={"type": "integer", "minimum": 0, "maximum": 9}),
                            {"type": "null"}]},
        "minItems": 1,
        "maxItems": 2,
    },
    "an integer beyond 63 bits": _object(a={"const": 2**64 - 1}),
    "numbers that differ in their last digit": _object(a={"enum": [0.1, 0.10000000000000002]}),
    "a reference with escapes": {
        "$defs": {"a/b~c": {"const": 1}}, **_object(a={"$ref": "#/$defs/a~1b~0c"}),
    },
    "an anchor": {"$defs": {"s": {"$anchor": "q", "const": 2}}, **_object(a={"$ref": "#q"})},
    "two objects of one discriminator": {
        "anyOf": [_object(kind={"const": 1}), _object(kind={"const": 2}, b={"const": 3})],
    },
    "a constant with a NUL": _object(a={"const": "a\0b"}),
    "an object without properties": _object(a=_object(), b={"type": "null"}),
    "a required name without a schema": {
        "type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "zz"],
    },
    "at most one character": {"type": ["string", "null"], "maxLength": 1},
    "one character": _object(a={"oneOf": [{"const": None},
                                         {"type": "string", "minLength": 1, "maxLength": 1}]}),
    "a map": {
        "type": "object",
        "propertyNames": {"maxLength": 2},
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 1,
    },
}  # fmt: skip
MAY_FAIL = {  # checked on every answer, or without an end: a model may miss them
    "all of two",
    "one of two that overlap", "a condition", "unique items", "what it is not",
    "a contained item", "a dependency", "an unanchored pattern", "a pattern of nested repeats",
    "a required name without a schema", "a map",
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_adversary_gets_an_invalid_answer_past_a_schema(
    folder: Path, cli: Any, const: Any, files: ModuleType, name: str
) -> None:
    schema = SCHEMAS[name]
    files.write_json("schema.json", schema)
    files.write_jsonl("jobs.jsonl", [{"id": "a", "prompt": "x"}])
    for adversary, prefer in ADVERSARIES.items():
        ran = cli("run", "jobs.jsonl", "--schema", "schema.json", "--model", const(prefer),
                  "--max-tokens", 300, "-o", f"{adversary}.jsonl")  # fmt: skip
        assert ran.code in (0, 3), ran.err
        (row,) = files.read_rows(f"{adversary}.jsonl")
        if row["status"] == "ok":
            assert _is_valid(row["value"], schema), f"{adversary}: {row['text']}"
            assert row["value"] == json.loads(row["text"])
        else:
            assert row["value"] is None
            assert name in MAY_FAIL, f"{adversary}: {row}"
            assert row["status"] == "truncated" or row["error"]["code"] == "schema_mismatch"


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (False, "false"),
        ({"type": "strng"}, "strng"),
        ({"enum": []}, "empty"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum 5 is above maximum 3"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength"),
        (_object() | {"required": ["b"]}, "'b'"),
        ({"$ref": "http://example.org/other.json"}, "nothing is fetched"),
        ({"$ref": "#/$defs/none"}, "#/$defs/none"),
        ({"type": "string", "pattern": "(["}, "pattern"),
    ],
    ids=str,
)
def test_a_schema_that_nothing_can_match_is_refused_before_the_model_loads(
    folder: Path, cli: Any, const: Any, files: ModuleType, schema: Any, sentence: str
) -> None:
    files.write_json("schema.json", schema)
    files.write_jsonl("jobs.jsonl", [{"id": "a", "prompt": "x"}])
    ran = cli(
        "run", "jobs.jsonl", "--schema", "schema.json", "--model", const("a"), "-o", "o.arrow"
    )
    assert ran.code == 2
    assert sentence in ran.err
    assert "loading" not in ran.err
    assert not Path("o.arrow").exists()
    assert not Path("o.arrow.batchradix").exists()


def test_what_is_only_checked_is_said_before_the_run(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    # Too many arrays to list: a list of all answers would enforce it.
    items = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "array", "items": items, "maxItems": 2, "uniqueItems": True}
    files.write_json("schema.json", schema)
    files.write_jsonl("jobs.jsonl", [{"id": "a", "prompt": "x"}])
    ran = cli(
        "run", "jobs.jsonl", "--schema", "schema.json", "--model", const("a"), "-o", "o.arrow"
    )
    assert "uniqueItems at #" in ran.err
    assert ran.err.index("uniqueItems") < ran.err.index("loading")


def test_a_budget_that_ends_inside_an_answer_is_said_and_gives_no_value(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    files.write_json("schema.json", _object(s={"type": "string"}))
    files.write_jsonl(
        "jobs.jsonl",
        [{"id": "cut", "prompt": "x", "max_tokens": 9}, {"id": "b", "prompt": "y"}],
    )
    ran = cli(
        "run", "jobs.jsonl", "--schema", "schema.json", "--model", const("a"), "-o", "o.jsonl"
    )
    assert ran.code == 3
    rows = files.read_rows("o.jsonl")
    assert [row["status"] for row in rows] == ["truncated", "truncated"]
    assert [row["finish_reason"] for row in rows] == ["length", "repetition"]
    assert [row["value"] for row in rows] == [None, None]
    assert rows[0]["text"] == '{"s":"a"}'
    assert json.loads(rows[1]["text"])["s"].startswith("a" * 100)


def test_the_closed_value_is_kept_when_asked_for_with_the_field_that_was_cut(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    files.write_json("schema.json", _object(s={"type": "string"}, n={"type": "integer"}))
    files.write_jsonl("jobs.jsonl", [{"id": "a", "prompt": "x"}])
    same = ("run", "jobs.jsonl", "--schema", "schema.json", "--model", const("a"),
            "--no-repetition-guard", "--max-tokens", 200, "-o", "o.jsonl")  # fmt: skip
    assert cli(*same).code == 3
    (row,) = files.read_rows("o.jsonl")
    assert "cut" not in row
    assert cli(*same, "--keep-truncated").code == 3
    (kept,) = files.read_rows("o.jsonl")
    assert kept["status"] == "truncated"
    assert kept["value"] == json.loads(row["text"])
    assert kept["cut"] == "/s"
    assert kept["completion_tokens"] == 200


def test_a_budget_below_every_answer_is_refused_with_the_remedy(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    files.write_json("schema.json", _object(s={"type": "string"}))
    files.write_jsonl("jobs.jsonl", [{"id": "a", "prompt": "x"}])
    ran = cli("run", "jobs.jsonl", "--schema", "schema.json", "--model", const("a"),
              "--max-tokens", 7, "-o", "o.jsonl")  # fmt: skip
    assert ran.code == 2
    assert '--max-tokens is 7, and the shortest answer of the schema, {"s":""}, takes 8' in ran.err
    assert "loading" not in ran.err
    assert not Path("o.jsonl").exists()


def test_a_stop_string_inside_an_answer_never_makes_a_valid_one(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    files.write_json("schema.json", _object(s={"type": "string", "maxLength": 3}))
    files.write_jsonl("jobs.jsonl", [{"id": "a", "prompt": "x"}])
    cli("run", "jobs.jsonl", "--schema", "schema.json", "--model", const("a"), "--stop", "aa",
        "-o", "o.jsonl")  # fmt: skip
    (row,) = files.read_rows("o.jsonl")
    assert row["status"] == "error"
    assert row["error"]["code"] == "invalid_json"


def test_a_key_that_is_written_twice_makes_no_object(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    files.write_json("schema.json", schema | {"minProperties": 2, "maxProperties": 2})
    files.write_jsonl("one.jsonl", [{"id": "r", "prompt": "x"}])
    ran = cli("run", "one.jsonl", "--schema", "schema.json", "--model", const('",:1}'),
              "--max-tokens", 60, "-o", "o.jsonl")  # fmt: skip
    assert ran.code == 3
    (row,) = files.read_rows("o.jsonl")
    assert row["text"].startswith('{"":1,"":1')
    assert (row["status"], row["value"]) == ("error", None)
    assert "the key '' twice" in row["error"]["message"]
