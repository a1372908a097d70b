"""Arrow streams in and out, and DuckDB at both ends of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import batchradix
from batchradix.errors import OptionError

ANSWER = {"n": 7, "note": "b"}


def texts(*rows: Any) -> pa.Table:
    return pa.table({"text": pa.array(rows, pa.string()), "k": list(range(len(rows)))})


def run_options(options: dict[str, Any]) -> dict[str, Any]:
    """The same options for `batchradix.run`."""
    return {name: options[name] for name in ("model", "schema", "template")} | {
        "sampling": batchradix.SamplingOptions(max_tokens=40),
        "engine": batchradix.EngineOptions(dtype="float32", num_threads=1, kv_tokens=4000),
    }


def test_rows_of_a_stream_come_out_as_a_stream_with_their_answers(options: dict[str, Any]) -> None:
    extractor = batchradix.Extractor(unnest=True, **options)
    rows = texts("a", None, "c", "d", "e")
    answered = extractor.stream(rows.to_reader(max_chunksize=2), batch_rows=3)
    assert isinstance(answered, pa.RecordBatchReader)
    assert answered.schema.names == ["text", "k", "n", "note"]
    batches = list(answered)
    assert [batch.num_rows for batch in batches] == [3, 2]
    table = pa.Table.from_batches(batches)
    assert table.select(["text", "k"]).equals(rows)
    assert table["n"].to_pylist() == [7, None, 7, 7, 7]


def test_a_stream_is_answered_as_it_is_asked_for(options: dict[str, Any]) -> None:
    taken = []

    def rows() -> Any:
        for number in range(4):
            taken.append(number)
            yield pa.record_batch({"text": [str(number)]})

    schema = pa.schema([("text", pa.string())])
    extractor = batchradix.Extractor(**options)
    answered = extractor.stream(pa.RecordBatchReader.from_batches(schema, rows()), batch_rows=1)
    assert taken == []
    first = answered.read_next_batch()
    assert first["value"].to_pylist() == [ANSWER]
    assert taken == [0]


def test_a_stream_without_rows_ends_with_its_columns(options: dict[str, Any]) -> None:
    answered = batchradix.Extractor(unnest=True, **options).stream(texts().to_reader())
    assert answered.read_all().to_pydict() == {"text": [], "k": [], "n": [], "note": []}


def test_batches_of_no_rows_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="batch_rows"):
        batchradix.Extractor(**options).stream(texts("a").to_reader(), batch_rows=0)


@pytest.mark.parametrize("output", [None, "a.arrow", "a.parquet", "a.jsonl", "a.csv"])
def test_a_run_takes_a_stream_and_gives_one(
    options: dict[str, Any], tmp_path: Path, output: str | None
) -> None:
    result = batchradix.run(
        texts("a", None).to_reader(),
        output=None if output is None else tmp_path / output,
        keep="all",
        **run_options(options),
    )
    reader = result.to_reader()
    assert isinstance(reader, pa.RecordBatchReader)
    table = reader.read_all()
    assert table.equals(result.to_arrow())
    assert table["k"].to_pylist() == [0, 1]
    assert table["status"].to_pylist() == ["ok", "error"]


def test_duckdb_gives_rows_and_reads_answers(options: dict[str, Any]) -> None:
    duckdb = pytest.importorskip("duckdb")
    asked = duckdb.connect().sql("select 't' || range as text, range as k from range(5)")
    answers = batchradix.run(asked, **run_options(options)).to_reader()  # noqa: F841
    counted = duckdb.connect().sql(
        "select status, count(*), sum(value.n), max(k) from answers group by 1"
    )
    assert counted.fetchall() == [("ok", 5, 35, 4)]
    extractor = batchradix.Extractor(unnest=True, **options)
    stream = extractor.stream(asked.to_arrow_reader(), batch_rows=2)  # noqa: F841
    found = duckdb.connect().sql("select k, n from stream where k > 2 order by k").fetchall()
    assert found == [(3, 7), (4, 7)]
