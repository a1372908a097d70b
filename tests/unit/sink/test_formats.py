from __future__ import annotations

import csv as std_csv
import datetime as dt
import io
import json
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix.errors import OptionError
from batchradix.sink.columns import arrange, result_schema, results_to_batch
from batchradix.sink.dictionaries import DictionaryUnion
from batchradix.sink.formats import check_format, open_writer, output_format, read_table

NUM_ROWS = 40


def write(path: Path, schema: pa.Schema, batches: list[pa.RecordBatch]) -> Path:
    writer = open_writer(path, output_format(path), schema)
    for batch in batches:
        writer.write_batch(batch)
    writer.close()
    return path


def one_column(path: Path, array: pa.Array) -> Path:
    batch = pa.record_batch({"x": array})
    return write(path, batch.schema, [batch])


def json_column(tmp_path: Path, array: pa.Array) -> list[str]:
    """The texts of a JSONL file's only column."""
    lines = one_column(tmp_path / "x.jsonl", array).read_bytes().decode().split("\n")
    assert lines.pop() == ""
    assert all(line.startswith('{"x":') and line.endswith("}") for line in lines)
    return [line[5:-1] for line in lines]


@pytest.fixture(scope="module")
def table(job: SimpleNamespace) -> pa.Table:
    schema = result_schema(
        id_type=job.id_type, value_type=job.value_type, metadata={"model": "m", "größe": "é"}
    )
    batches = []
    for start in range(0, NUM_ROWS, 15):
        rows = [job.result_of(r) for r in range(start, min(start + 15, NUM_ROWS))]
        batch = results_to_batch(rows, job.shard_schema, job.encode_values)
        batches.append(arrange(batch, schema, unnest=False, kept=None))
    return pa.Table.from_batches(batches, schema=schema)


def test_arrow_files_open_by_memory_map_with_every_type_and_the_metadata(
    tmp_path: Path, table: pa.Table
) -> None:
    path = write(tmp_path / "o.arrow", table.schema, table.to_batches())
    with pa.memory_map(str(path)) as source:
        found = pa.ipc.open_file(source).read_all()
        assert found.schema.equals(table.schema, check_metadata=True)
        assert found.to_pylist() == table.to_pylist()
    assert not list(tmp_path.glob("*.spool"))


def test_arrow_files_without_dictionaries_are_read_without_a_copy(tmp_path: Path) -> None:
    path = one_column(tmp_path / "o.arrow", pa.array(range(1000)))
    before = pa.total_allocated_bytes()
    with pa.memory_map(str(path)) as source:
        column = pa.ipc.open_file(source).read_all()["x"]
        assert pa.total_allocated_bytes() == before
        assert column.to_pylist() == list(range(1000))


def test_polars_reads_arrow_and_parquet_files(
    tmp_path: Path, table: pa.Table, recwarn: pytest.WarningsRecorder
) -> None:
    # arrow.json is plain text to polars, of which it warns
    for name, read in (("o.arrow", pl.read_ipc), ("o.parquet", pl.read_parquet)):
        path = write(tmp_path / name, table.schema, table.to_batches())
        frame = read(path)
        recwarn.clear()
        assert frame["row"].to_list() == list(range(NUM_ROWS))
        fields = frame["value"].struct.unnest()
        assert fields["name"].to_list() == [v and v["name"] for v in table["value"].to_pylist()]
        assert fields["kind"].cast(pl.String).to_list() == [
            v and v["kind"] for v in table["value"].to_pylist()
        ]


def test_parquet_files_hold_every_type_and_the_metadata(tmp_path: Path, table: pa.Table) -> None:
    path = write(tmp_path / "o.parquet", table.schema, table.to_batches())
    found = pq.read_table(path)
    assert found.to_pylist() == table.to_pylist()
    assert found.schema.metadata == table.schema.metadata
    for name in ("price", "day", "at", "time", "any", "blob", "kind"):
        wanted = table.schema.field("value").type.field(name).type
        assert found.schema.field("value").type.field(name).type == wanted
    info = pq.ParquetFile(path).metadata
    assert info.num_row_groups == 1
    assert info.row_group(0).column(0).compression == "ZSTD"


def test_parquet_row_groups_are_not_as_small_as_the_batches(tmp_path: Path) -> None:
    batch = pa.record_batch({"x": pa.array(range(1000))})
    path = write(tmp_path / "o.parquet", batch.schema, [batch] * 200)
    info = pq.ParquetFile(path).metadata
    assert [info.row_group(i).num_rows for i in range(info.num_row_groups)] == [131_000, 69_000]


def test_jsonl_lines_are_objects_with_every_column_and_exact_values(
    tmp_path: Path, table: pa.Table, job: SimpleNamespace
) -> None:
    data = write(tmp_path / "o.jsonl", table.schema, table.to_batches()).read_bytes()
    assert data.endswith(b"}\n")
    assert b"\r" not in data
    lines = data.decode("utf-8").split("\n")[:-1]
    assert len(lines) == NUM_ROWS
    assert '"é中' in lines[1].replace("\\", "")
    for row, line in enumerate(lines):
        found = json.loads(line, parse_float=Decimal)
        assert list(found) == table.schema.names
        result, value = job.result_of(row), found["value"]
        assert (found["id"], found["row"]) == (result.id, row)
        if result.error is not None:
            assert found["error"] == {"code": "prompt_too_long", "message": result.error.message}
        else:
            assert found["error"] is None
        if result.value is None:
            assert value is None
            continue
        if row % 17 == 0:  # the only texts that are JSON: the answer itself, not the column
            assert value == json.loads(result.text)
            continue
        assert list(value) == [f.name for f in job.value_type]
        assert value["name"] == result.value["name"]
        assert value["note"] == result.value["note"]
        assert value["n"] == result.value["n"]
        assert value["price"] == result.value["price"]
        assert value["day"] == result.value["day"].isoformat()
        assert dt.datetime.fromisoformat(value["at"]) == result.value["at"]
        assert dt.time.fromisoformat(value["time"]) == result.value["time"]
        assert value["any"] == json.loads(result.value["any"] or "null")
        assert float(value["score"]) == result.value["score"]


def test_polars_reads_jsonl_and_csv(tmp_path: Path, table: pa.Table) -> None:
    path = write(tmp_path / "o.jsonl", table.schema, table.to_batches())
    assert pl.read_ndjson(path)["text"].to_list() == table["text"].to_pylist()
    path = write(tmp_path / "o.csv", table.schema, table.to_batches())
    assert pl.read_csv(path)["text"].to_list() == table["text"].to_pylist()


def test_jsonl_never_holds_a_bare_nan(tmp_path: Path) -> None:
    values = [1.5, float("nan"), float("inf"), -float("inf"), None, 1e300, 5e-324, -0.0]
    texts = json_column(tmp_path, pa.array(values))
    assert texts == ["1.5", "null", "null", "null", "null", "1e+300", "5e-324", "-0.0"]
    assert json_column(tmp_path, pa.array([[float("nan")]])) == ["[null]"]


def test_jsonl_keeps_every_digit(tmp_path: Path) -> None:
    assert json_column(tmp_path, pa.array([2**64 - 1], pa.uint64())) == ["18446744073709551615"]
    wide = pa.array([Decimal("-0.00010"), Decimal(10) ** 30, None], pa.decimal128(38, 5))
    assert json_column(tmp_path, wide) == ["-0.00010", f"1{'0' * 30}.00000", "null"]
    assert json_column(tmp_path, pa.array([0.1, None, 1e-8], pa.float32())) == [
        "0.1",
        "null",
        "1e-08",
    ]


@pytest.mark.parametrize(
    ("array", "texts"),
    [
        (pa.array([True, None, False]), ["true", "null", "false"]),
        (pa.array([b"\x00\xff", None, b""]), ['"AP8="', "null", '""']),
        (pa.array([b"ab"], pa.binary(2)), ['"YWI="']),
        (pa.nulls(2), ["null", "null"]),
        (pa.array([dt.datetime(2024, 1, 2, 3, 4, 5)]), ['"2024-01-02T03:04:05.000000"']),
        (
            pa.array([1_704_164_645_123_456_789], pa.timestamp("ns", "UTC")),
            ['"2024-01-02T03:04:05.123456789Z"'],
        ),
        (
            pa.array([0], pa.timestamp("s", "America/New_York")),
            ['"1969-12-31T19:00:00-05:00"'],
        ),
        (pa.array([-1], pa.timestamp("ms", "UTC")), ['"1969-12-31T23:59:59.999Z"']),
        (pa.array([0], pa.timestamp("s", "No/Where")), ['"1970-01-01T00:00:00Z"']),
        (pa.array([0.5, None], pa.float16()), ["0.5", "null"]),
        (pa.array([[1], None], pa.list_view(pa.int8())), ["[1]", "null"]),
        (pa.array(["x", None], pa.string_view()), ['"x"', "null"]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]), ['"a"', '"a"', '"b"']),
        (pa.array([dt.date(1, 1, 1)]), ['"0001-01-01"']),
        (
            pa.array([1500, -5, 0, None], pa.duration("ms")),
            ['"PT1.5S"', '"-PT0.005S"', '"PT0S"', "null"],
        ),
        (pa.array([90], pa.duration("s")), ['"PT90S"']),
        (
            pa.array([[("a", 1), ('"', None)], None, []], pa.map_(pa.string(), pa.int64())),
            ['{"a":1,"\\"":null}', "null", "{}"],
        ),
        (
            pa.array([[(1, "x")]], pa.map_(pa.int64(), pa.string())),
            ['[{"key":1,"value":"x"}]'],
        ),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)), ["[1,2]", "null", "[3,4]"]),
        (pa.array([["a"], None, []], pa.large_list(pa.string())), ['["a"]', "null", "[]"]),
        (pa.array([{"a": None}, None]), ['{"a":null}', "null"]),
        (pa.array([{}, None], pa.struct([])), ["{}", "null"]),
        (pa.array(["b", None, "a"]).dictionary_encode(), ['"b"', "null", '"a"']),
        (pa.array(['"\\\n\x00\x7f\u2028é😀']), ['"\\"\\\\\\n\\u0000\x7f\u2028é😀"']),
        (
            pa.array(["7", '"7"', "null", None, '{\n"a": 1.10}', "NaN", "{torn"], pa.json_()),
            ["7", '"7"', "null", "null", '{ "a": 1.10}', '"NaN"', '"{torn"'],
        ),
    ],
)
def test_jsonl_spells_each_type_as_promised(
    tmp_path: Path, array: pa.Array, texts: list[str]
) -> None:
    assert json_column(tmp_path, array) == texts


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1], [2, 3], None, [4], []]),
        pa.array([{"a": [1]}, None, {"a": None}, {"a": [2, 3]}, {"a": []}]),
        pa.array([[1, 2], None, [3, 4], [5, 6], None], pa.list_(pa.int8(), 2)),
        pa.array([[("a", 1)], None, [], [("b", 2)], [("c", 3)]], pa.map_(pa.string(), pa.int8())),
        pa.array([0.5, None, 1.5, 2.5, None], pa.float32()),
    ],
)
def test_jsonl_of_a_slice_is_the_slice_of_the_lines(tmp_path: Path, array: pa.Array) -> None:
    whole = json_column(tmp_path, array)
    assert json_column(tmp_path, array.slice(1, 3)) == whole[1:4]
    assert json_column(tmp_path, array.slice(2)) == whole[2:]


def test_csv_follows_rfc_4180(tmp_path: Path) -> None:
    batch = pa.record_batch(
        {
            "s": pa.array(["a,b", 'q"q', "line\nend", "", None, " pad", "é"]),
            "f": pa.array([0.5, float("nan"), float("inf"), -float("inf"), None, 1e22, -0.0]),
            "b": pa.array([True, False, None, True, True, True, True]),
            "n": pa.array([[1, 2], None, [], ["x"][:0], [3], [4], [5]]),
            "j": pa.array(['"7"', "7", None, "{}", "[1]", "null", "1"], pa.json_()),
            'odd,"name"': pa.array([b"\xff"] * 7),
        }
    )
    data = write(tmp_path / "o.csv", batch.schema, [batch]).read_bytes()
    assert data.count(b"\r\n") == 8
    assert data.startswith(b's,f,b,n,j,"odd,""name"""\r\n"a,b",0.5,true,"[1,2]","""7""",/w==\r\n')
    rows = list(std_csv.reader(io.StringIO(data.decode(), newline="")))
    assert [r[0] for r in rows[1:]] == ["a,b", 'q"q', "line\nend", "", "", " pad", "é"]
    assert [r[1] for r in rows[1:]] == ["0.5", "NaN", "inf", "-inf", "", "1e+22", "-0.0"]
    assert [r[3] for r in rows[1:]] == ["[1,2]", "", "[]", "[]", "[3]", "[4]", "[5]"]
    assert b'\r\n"",-inf,' in data  # an empty string is not a null
    assert b"\r\n,,true,[3]," in data


def test_csv_error_cells_are_json_of_code_and_message(tmp_path: Path, table: pa.Table) -> None:
    data = write(tmp_path / "o.csv", table.schema, table.to_batches()).read_text("utf-8")
    rows = list(std_csv.DictReader(io.StringIO(data, newline="")))
    assert json.loads(rows[10]["error"])["code"] == "prompt_too_long"
    assert rows[0]["error"] == ""
    assert json.loads(rows[0]["value"])["n"] == 2**63 - 1


@pytest.mark.parametrize("extension", [".arrow", ".parquet", ".jsonl", ".csv"])
def test_no_rows_make_a_file_of_the_same_schema(
    tmp_path: Path, table: pa.Table, extension: str
) -> None:
    path = write(tmp_path / f"o{extension}", table.schema, [])
    if extension == ".arrow":
        assert pa.ipc.open_file(path.read_bytes()).read_all().schema == table.schema
    elif extension == ".parquet":
        assert pq.read_table(path).num_rows == 0
    elif extension == ".jsonl":
        assert path.read_bytes() == b""
    else:
        assert path.read_text() == ",".join(table.schema.names) + "\n"


def test_the_extension_may_be_in_capitals() -> None:
    assert output_format("A.B/O.PARQUET") == ".parquet"


def test_a_schema_the_format_cannot_hold_is_refused_before_any_work() -> None:
    schema = pa.schema([("value", pa.struct([]))])
    check_format("o.arrow", schema)
    check_format("o.jsonl", schema)
    with pytest.raises(OptionError, match="choose another format"):
        check_format("o.parquet", schema)


def dictionary(*values: Any, type_: pa.DataType | None = None) -> pa.Array:
    return (
        pa.array(values).dictionary_encode().cast(type_ or pa.dictionary(pa.int32(), pa.string()))
    )


def test_differing_dictionaries_become_one_at_any_depth(tmp_path: Path) -> None:
    d = pa.dictionary(pa.int32(), pa.string())
    s = pa.struct([("k", d), ("l", pa.list_(d))])
    schema = pa.schema([("d", d), ("s", s), ("m", pa.map_(pa.string(), d)), ("f", pa.list_(d, 2))])

    def batch(words: str) -> pa.RecordBatch:
        def struct_of(i: int) -> pa.Array:
            inner = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), dictionary(*words))
            mask = pa.array([False, i == 1])
            return pa.StructArray.from_arrays(
                [dictionary(*words[:2]), inner], fields=list(s), mask=mask
            )

        map_ = pa.MapArray.from_arrays(
            pa.array([0, 1, 3], pa.int32()), pa.array(["x", "y", "z"]), dictionary(*words)
        )
        fixed = pa.FixedSizeListArray.from_arrays(dictionary(*words, words[0]), 2)
        columns = [dictionary(words[1], None), struct_of(ord(words[0]) % 2), map_, fixed]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    batches = [batch("abc"), batch("dba"), batch("xyz").slice(1), batch("aaa")]
    path = write(tmp_path / "o.arrow", schema, batches)
    with pa.ipc.open_file(path.read_bytes()) as reader:
        found = reader.read_all()
    assert found.schema == schema
    assert found.to_pylist() == pa.Table.from_batches(batches).to_pylist()
    assert found["d"].chunk(0).dictionary.to_pylist() == ["b", "y", "a"]


def test_the_order_of_an_ordered_dictionary_stays(tmp_path: Path) -> None:
    sizes = pa.DictionaryArray.from_arrays(
        pa.array([2, 0], pa.int32()), pa.array(["small", "medium", "large"]), ordered=True
    )
    path = one_column(tmp_path / "o.arrow", sizes)
    column = pa.ipc.open_file(path.read_bytes()).read_all()["x"].chunk(0)
    assert column.type.ordered
    assert column.dictionary.to_pylist() == ["small", "medium", "large"]
    assert column.to_pylist() == ["large", "small"]


def test_dictionaries_that_repeat_values_or_hold_nulls_are_read_right() -> None:
    odd = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 2, 3, None], pa.int32()), pa.array(["a", None, "a", "b"])
    )
    batch = pa.record_batch({"x": odd})
    union = DictionaryUnion(batch.schema)
    assert union.needed
    assert union.restore(union.index(batch)).column("x").to_pylist() == ["a", None, "a", "b", None]


@pytest.mark.parametrize("extension", [".arrow", ".parquet", ".jsonl", ".csv"])
def test_finished_files_are_read_back(tmp_path: Path, table: pa.Table, extension: str) -> None:
    found = read_table(write(tmp_path / f"o{extension}", table.schema, table.to_batches()))
    assert found.column_names == table.column_names
    for name in ("id", "row", "status", "text", "completion_tokens"):
        assert found[name].to_pylist() == table[name].to_pylist()
    if extension in (".arrow", ".parquet"):
        assert found.to_pylist() == table.to_pylist()
    write(tmp_path / f"none{extension}", table.schema, [])
    assert read_table(tmp_path / f"none{extension}").num_rows == 0


def test_jsonl_embeds_strings_that_their_field_marks_as_json(tmp_path: Path) -> None:
    marked = pa.field("v", pa.string(), metadata={b"batchradix.encoding": b"json"})
    cells = pa.array(["7", '"7"', "null", None, "7.5"])
    inside = pa.StructArray.from_arrays([cells], fields=[marked])
    table = pa.table([cells, inside], schema=pa.schema([marked, pa.field("s", inside.type)]))
    lines = write(tmp_path / "o.jsonl", table.schema, table.to_batches()).read_text().splitlines()
    values = [json.loads(line)["v"] for line in lines]
    assert values == [7, "7", None, None, 7.5]
    assert [json.loads(line)["s"]["v"] for line in lines] == values
