"""Tables, frames, data sets and lists that are already in memory."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchradix.errors import InputError, RowErrorCode
from batchradix.jobs import open_job
from batchradix.jobs.base import NO_ID_COLUMN
from batchradix.types import Row


def rows_of(data: Any, columns: list[str] | None = None, **settings: Any) -> list[Row]:
    with open_job(data, **settings) as source:
        return [row for batch in source.batches(columns, 2) for row in batch]


def test_a_list_of_strings_is_a_list_of_prompts() -> None:
    rows = rows_of(["a", "b"])
    assert [(r.id, r.line, r.values) for r in rows] == [
        ("0", None, {"prompt": "a"}),
        ("1", None, {"prompt": "b"}),
    ]


def test_dicts_keep_missing_and_null_apart_and_types_are_inferred() -> None:
    data = [{"id": 7, "a": None, "n": np.int64(3)}, {"id": "x", "n": np.float32(0.5)}]
    rows = rows_of(data)
    assert [r.values for r in rows] == [{"id": 7, "a": None, "n": 3}, {"id": "x", "n": 0.5}]
    assert [r.id for r in rows] == ["7", "x"]
    with open_job(data) as source:
        assert source.keep_schema("all") == pa.schema([("a", pa.string()), ("n", pa.float64())])


def test_values_json_has_not_are_kept_as_text() -> None:
    moment = datetime(2024, 1, 2, tzinfo=UTC)
    data = [{"a": moment, "b": Decimal("1.5"), "c": b"x"}]
    assert rows_of(data)[0].values == data[0]
    with open_job(data) as source:
        (kept,) = source.keep_batches("all")
    assert kept.to_pylist() == [{"a": f'"{moment}"', "b": '"1.5"', "c": "\"b'x'\""}]


def test_an_item_that_is_no_record_is_an_error_row() -> None:
    rows = rows_of([{"a": 1}, 5, {1: 2}, "p", None])
    assert [r.error and r.error.code for r in rows] == [
        None,
        RowErrorCode.BAD_LINE,
        RowErrorCode.BAD_LINE,
        None,
        RowErrorCode.BAD_LINE,
    ]
    assert rows[3].values == {"prompt": "p"}


def test_an_empty_list_has_no_rows() -> None:
    assert rows_of([]) == []


def test_record_batches_and_tables_without_columns_are_read() -> None:
    assert [r.values for r in rows_of(pa.record_batch({"a": [1, 2]}))] == [{"a": 1}, {"a": 2}]
    table = pa.table({"a": [1, 2, 3]}).select([])
    assert [r.id for r in rows_of(table)] == ["0", "1", "2"]


def test_a_polars_frame_is_read_with_its_types() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(
        {"id": [1, 2, 3], "c": polars.Series(["u", None, "u"], dtype=polars.Categorical)}
    )
    assert [r.values["c"] for r in rows_of(frame)] == ["u", None, "u"]
    with open_job(frame, limit=2) as source:
        assert (source.id_type, source.num_rows) == (pa.int64(), 2)
        assert source.keep_schema("all") == pa.schema([("c", pa.large_string())])
    with pytest.raises(InputError, match="collect"):
        open_job(frame.lazy())


def test_a_pandas_frame_is_read_through_the_arrow_stream() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": ["a", "b"], "n": [1, None]})
    assert [(r.id, r.values["n"]) for r in rows_of(frame)] == [("a", 1.0), ("b", None)]


def test_a_dataset_is_read_in_the_order_of_its_selection() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"id": list("abcde"), "text": list("vwxyz")})
    chosen = data.select([4, 0, 2]).with_format("numpy")
    assert [(r.id, r.values) for r in rows_of(chosen, ["text"])] == [
        ("e", {"text": "z"}),
        ("a", {"text": "v"}),
        ("c", {"text": "x"}),
    ]
    with open_job(chosen.select_columns(["text"]), limit=2) as source:
        assert source.columns == ("text",)
        assert source.keep_schema("all").names == ["input_text"]
        assert [b.num_rows for b in source.keep_batches([])] == [2]
        kept = pa.Table.from_batches(source.keep_batches("all"))
        assert kept["input_text"].to_pylist() == ["z", "v"]
    with pytest.raises(InputError, match=r"splits.* train"):
        open_job(datasets.DatasetDict({"train": data}))
    with pytest.raises(InputError, match="without streaming"):
        open_job(data.to_iterable_dataset())


@pytest.mark.parametrize("data", [None, 5, {"a": [1]}, object(), b"x.parquet"])
def test_other_objects_are_refused(data: Any) -> None:
    with pytest.raises(InputError, match="is no input"):
        open_job(data)


def test_openai_requests_are_known_in_memory_too() -> None:
    body = {"prompt": "x", "n": 2}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with open_job([request]) as source:
        rows = [row for batch in source.batches(None) for row in batch]
    assert source.is_requests
    assert [(row.id, row.values) for row in rows] == [("a", {"prompt": "x"})] * 2


def test_a_value_json_cannot_hold_spoils_its_own_row_only() -> None:
    circular: list[Any] = []
    circular.append(circular)
    data = [{"n": circular}, {"n": {(1, 2): 3}}, {"n": {"a": [1]}}]
    with open_job(data) as source:
        rows = [row for batch in source.batches(None) for row in batch]
        kept = [batch.to_pydict()["n"] for batch in source.keep_batches("all")]
    assert [row.error and row.error.message for row in rows] == [
        "row 0 holds in field 'n' what JSON cannot: itself, or keys that are no text",
        "row 1 holds in field 'n' what JSON cannot: itself, or keys that are no text",
        None,
    ]
    assert kept == [[None, None, '{"a":[1]}']]


def test_text_of_numpy_is_kept_as_text() -> None:
    with open_job([{"prompt": np.str_("a")}, {"prompt": "b"}]) as source:
        [batch] = source.keep_batches("all")
    assert batch.to_pydict() == {"prompt": ["a", "b"]}


def stream(*batches: Any) -> pa.RecordBatchReader:
    """A stream of these record batches; an exception among them is raised in its place."""

    def made() -> Any:
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    return pa.RecordBatchReader.from_batches(batches[0].schema, made())


def test_a_stream_can_be_read_any_number_of_times_and_keeps_types_without_encodings() -> None:
    words = pa.array(["x", "y"]).dictionary_encode()
    first = pa.record_batch({"id": [1, 2], "w": words})
    second = pa.record_batch({"id": [3], "w": pa.array(["z"]).dictionary_encode()})
    with open_job(stream(first, second.slice(0, 1), first.slice(1))) as source:
        assert source.num_rows == 4
        assert [r.id for batch in source.batches(None, 3) for r in batch] == [1, 2, 3, 2]
        kept = pa.Table.from_batches(source.keep_batches("all"))
    assert kept.column("w").to_pylist() == ["x", "y", "z", "y"]
    assert kept.schema.field("w").type == pa.string()


def test_a_stream_is_copied_to_a_file_that_is_gone_when_the_source_is_closed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = open_job(stream(pa.record_batch({"a": ["x"]})))
    assert list(tmp_path.iterdir())
    source.close()
    assert not list(tmp_path.iterdir())


def test_a_stream_without_rows_is_a_job_without_rows() -> None:
    with open_job(pa.schema([("a", pa.string())]).empty_table().to_reader()) as source:
        assert (source.num_rows, source.columns) == (0, ("a",))


def test_a_stream_that_fails_is_an_input_error() -> None:
    with pytest.raises(InputError, match="the stream cannot be read to its end: it was lost"):
        open_job(stream(pa.record_batch({"a": [1]}), OSError("it was lost")))


def test_what_gives_a_stream_is_read_as_one() -> None:
    class Relation:
        def to_arrow_reader(self) -> pa.RecordBatchReader:
            return pa.table({"prompt": ["a", "b"]}).to_reader()

    assert [row.values for row in rows_of(Relation())] == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("make", [pa.Table.from_pylist, list])
def test_without_an_id_column_ids_are_row_numbers_whatever_columns_there_are(make: Any) -> None:
    rows = [{"id": "x", "": 1}, {"id": "x", "": 2}]
    with open_job(make(rows), id_column=NO_ID_COLUMN) as source:
        assert source.num_duplicate_ids == 0
        found = [row for batch in source.batches(None) for row in batch]
    assert [row.id for row in found] == ["0", "1"]
    assert [row.values for row in found] == rows
