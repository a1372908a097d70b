"""Tables of answers: their types come from the schema, never from what the rows happen to hold."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest


def _types(table: pa.Table) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in table.schema]


def _answer(
    cli: Any, const: Any, files: ModuleType, schema: Any, prefer: str, *options: Any
) -> Any:
    """The table of one row."""
    files.write_json("schema.json", schema)
    files.write_jsonl("one.jsonl", [{"id": "r", "prompt": "x"}])
    ran = cli("run", "one.jsonl", "--schema", "schema.json", "--model", const(prefer),
              "--max-tokens", 80, "-o", "one.arrow", "--restart", *options)  # fmt: skip
    assert ran.code == 0, ran.err
    return files.read_table("one.arrow")


def test_an_optional_field_has_its_column_whether_or_not_it_is_answered(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("ar-01")
    for name, prefer, max_tokens in (
        ("without", '}"1', 64), ("with", 'o}"1', 64), ("failed", 'o}"1', 20),
    ):  # fmt: skip
        for ending in ("arrow", "parquet", "jsonl"):
            cli("run", "jobs.jsonl", "--schema", "schema.json", "--model", const(prefer),
                "--max-tokens", max_tokens, "-o", f"{name}.{ending}")  # fmt: skip
    value = pa.struct([("name", pa.string()), ("note", pa.string()), ("n", pa.int64())])
    for ending in ("arrow", "parquet"):
        tables = [files.read_table(f"{n}.{ending}") for n in ("without", "with", "failed")]
        assert tables[0].schema.field("value").type == value
        assert _types(tables[0]) == _types(tables[1]) == _types(tables[2])
        joined = pa.concat_tables(tables)
        assert joined["value"].to_pylist()[::2] == [
            {"name": "}}", "note": None, "n": 1}, {"name": "oo", "note": "oo", "n": 1}, None,
        ]  # fmt: skip
    assert files.column("without.jsonl", "value") == [{"name": "}}", "n": 1}] * 2
    assert files.column("with.jsonl", "value") == [{"name": "oo", "note": "oo", "n": 1}] * 2


def test_another_model_s_rows_never_join_a_table_in_silence(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("ar-01")
    options = ["--schema", "schema.json", "--max-tokens", 64, "-o", "one.arrow"]
    cli("run", "jobs.jsonl", *options, "--model", const('}"1'))
    before = Path("one.arrow").read_bytes()
    ran = cli("run", "jobs.jsonl", *options, "--model", const('o}"1'), "--resume")
    assert ran.code == 2
    assert "model" in ran.err
    assert "--restart" in ran.err
    assert Path("one.arrow").read_bytes() == before


def test_a_value_of_several_types_keeps_number_text_and_null_apart(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("ar-03")
    cells = []
    types = set()
    for number, prefer in enumerate(("7}", '"7', "n", "7.5")):
        model = ["--schema", "schema.json", "--model", const(prefer), "--max-tokens", 32]
        assert cli("run", "jobs.jsonl", *model, "-o", f"v{number}.parquet").code == 0
        assert cli("run", "jobs.jsonl", *model, "-o", f"v{number}.jsonl").code == 0
        table = files.read_table(f"v{number}.parquet")
        types.add(table.schema.field("value").type)
        cells.append(table["value"][0].as_py()["v"])
        assert files.read_rows(f"v{number}.jsonl")[0]["value"]["v"] == [7, "7", None, 7.5][number]
    assert len(types) == 1
    assert [json.loads(cell) for cell in cells] == [7, "7", None, 7.5]
    assert isinstance(json.loads(cells[0]), int)


def test_text_or_null_is_a_plain_text_column(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("ar-03")
    cli("run", "jobs.jsonl", "--schema", "schema_null.json", "--model", const("n"),
        "--max-tokens", 32, "-o", "null.parquet")  # fmt: skip
    table = files.read_table("null.parquet")
    assert table.schema.field("value").type == pa.struct([("v", pa.string())])
    assert table["value"].to_pylist() == [{"v": None}] * 2


@pytest.mark.parametrize(
    ("schema", "type_"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 9}, pa.int64()),
        ({"type": "number", "minimum": 0, "maximum": 1}, pa.float64()),
        ({"type": "boolean"}, pa.bool_()),
        ({"type": "string", "maxLength": 2}, pa.string()),
        ({"enum": ["a", "b"]}, pa.dictionary(pa.int32(), pa.string())),
        ({"type": "string", "format": "date"}, pa.date32()),
        ({"anyOf": [{"type": "null"}, {"const": 5}]}, pa.int64()),
        ({"type": "array", "items": {"const": True}, "maxItems": 2}, pa.list_(pa.bool_())),
        (
            {"type": "array", "items": {"type": "object", "properties": {"a": {"const": 1}},
                                        "additionalProperties": False}, "maxItems": 1},
            pa.list_(pa.struct([("a", pa.int64())])),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_types_come_from_the_schema_at_the_top_and_below(
    folder: Path, cli: Any, const: Any, files: ModuleType, schema: Any, type_: pa.DataType
) -> None:
    def plain(found: pa.DataType) -> str:
        return str(found).replace("large_", "").replace("element", "item")

    top = _answer(cli, const, files, schema, "a")
    assert plain(top.schema.field("value").type) == plain(type_)
    below = _answer(
        cli, const, files,
        {"type": "object", "properties": {"x": schema}, "required": ["x"],
         "additionalProperties": False}, "a",
    )  # fmt: skip
    assert plain(below.schema.field("value").type) == plain(pa.struct([("x", type_)]))
    assert json.loads(top["text"][0].as_py()) is not None or type_ == pa.int64()


def test_names_of_every_kind_are_columns_in_the_order_of_the_schema(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    names = ["z", "a b", "ü", "", 'q"', "a.b", "北", "A"]
    schema = {
        "type": "object", "properties": {name: {"const": name} for name in names},
        "required": names, "additionalProperties": False,
    }  # fmt: skip
    expected = [{name: name for name in names}]
    nested = _answer(cli, const, files, schema, "a", "--max-tokens", 400)
    assert nested.schema.field("value").type.names == names
    assert nested["value"].to_pylist() == expected
    flat = _answer(cli, const, files, schema, "a", "--max-tokens", 400, "--unnest")
    assert flat.select(names).to_pylist() == expected


@pytest.mark.parametrize("name", ["status", "value", "id"])
def test_unnesting_over_a_result_column_is_refused_before_the_model_loads(
    folder: Path, cli: Any, const: Any, files: ModuleType, name: str
) -> None:
    files.write_json("schema.json", {"type": "object", "properties": {name: {"const": 1}}})
    files.write_jsonl("jobs.jsonl", [{"id": "r", "prompt": "x"}])
    ran = cli("run", "jobs.jsonl", "--schema", "schema.json", "--model", const("a"), "--unnest",
              "-o", "o.arrow")  # fmt: skip
    assert ran.code == 2
    assert f"result columns: {name};" in ran.err
    assert "loading" not in ran.err


def test_an_integer_without_bounds_fits_its_column(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    table = _answer(cli, const, files, {"type": "integer"}, "9")
    (row,) = table.to_pylist()
    assert json.loads(row["text"]) == row["value"] > 10**16
    assert table.schema.field("value").type == pa.int64()


def test_a_table_of_no_rows_and_one_of_errors_only_have_the_same_columns(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    for ending in ("arrow", "parquet"):
        for name, lines in (("none", []), ("bad", ["no json"]), ("fine", ['{"prompt": "x"}'])):
            files.write_jsonl(f"{name}.jsonl", lines)
            cli("run", f"{name}.jsonl", "--schema", "tag.json", "--model", const("a"),
                "-o", f"{name}.{ending}")  # fmt: skip
        tables = [files.read_table(f"{name}.{ending}") for name in ("none", "bad", "fine")]
        assert _types(tables[0]) == _types(tables[1]) == _types(tables[2])
        assert [len(table) for table in tables] == [0, 1, 1]


def test_objects_without_fields_and_nulls_fit_every_format(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    empty = {"type": "object", "additionalProperties": False}
    value = {"a": {}, "n": None, "l": []}
    schema = {
        "type": "object", "required": list(value), "additionalProperties": False,
        "properties": {"a": empty, "n": {"const": None},
                       "l": {"type": "array", "items": {"type": "null"}, "maxItems": 1}},
    }  # fmt: skip
    files.write_json("schema.json", schema)
    files.write_jsonl("one.jsonl", [{"id": "r", "prompt": "x"}])
    tables = {}
    for ending in ("arrow", "parquet", "jsonl", "csv"):
        ran = cli("run", "one.jsonl", "--schema", "schema.json", "--model", const("]"),
                  "--max-tokens", 60, "-o", f"o.{ending}")  # fmt: skip
        assert ran.code == 0, ran.err
        if ending in ("arrow", "parquet"):
            tables[ending] = files.column(f"o.{ending}", "value")
    assert files.column("o.jsonl", "value") == [value]
    assert tables["arrow"] == tables["parquet"] == [value | {"a": "{}"}]
    with open("o.csv", newline="", encoding="utf-8") as lines:
        assert [json.loads(row["value"]) for row in csv.DictReader(lines)] == [value]


def test_kept_columns_named_as_result_columns_are_told_apart(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    files.write_jsonl("one.jsonl", [{"id": "r", "prompt": "x", "text": "mine", "value": 5}])
    ran = cli("run", "one.jsonl", "--schema", "tag.json", "--model", const("a"), "--keep", "all",
              "-o", "o.arrow")  # fmt: skip
    assert ran.code == 0, ran.err
    (row,) = files.read_rows("o.arrow")
    assert (row["input_text"], row["input_value"]) == ("mine", 5)
    assert row["value"] == {"tag": "k"}
