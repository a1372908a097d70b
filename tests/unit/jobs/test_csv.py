"""CSV files: text values, null cells, bad records."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.errors import InputError, RowErrorCode
from batchradix.jobs import open_job
from batchradix.types import Row


def rows_of(path: Path) -> list[Row]:
    with open_job(path) as source:
        return [row for batch in source.batches(None) for row in batch]


def test_values_are_text_as_written_and_empty_cells_are_null(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid,n,t\r\n007,1.50,"a ""b""\r\n,c"\r\n\r\n8,,x\r\n')
    rows = rows_of(path)
    assert [r.values for r in rows] == [
        {"id": "007", "n": "1.50", "t": 'a "b"\r\n,c'},
        {"id": "8", "n": None, "t": "x"},
    ]
    assert [(r.id, r.line) for r in rows] == [("007", 2), ("8", 5)]
    with open_job(path) as source:
        schema = pa.schema([("n", pa.string()), ("t", pa.string())])
        assert source.keep_schema("all") == schema


def test_bad_records_are_error_rows_between_good_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,t\n1,a\n2\n3,a,b\n4,\xff\n5,"x"y\n6,b\n')
    rows = rows_of(path)
    bad = [r for r in rows if r.error is not None]
    assert [(r.line, r.error and r.error.code) for r in bad] == [
        (n, RowErrorCode.BAD_LINE) for n in (3, 4, 5, 6)
    ]
    assert [r.id for r in rows if r.error is None] == ["1", "6"]
    assert bad[0].error is not None
    assert "a.csv line 3 has 1 cells, but the header has 2" in bad[0].error.message


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_quote_that_nothing_closes_is_refused_and_swallows_no_rows(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b'id\n1\n"2\n3\n4\n')
    with pytest.raises(InputError, match=rf"{name} line 3: a quote is opened .* never closed"):
        rows_of(path)
    path.write_bytes(b'id\n1\n"2\n""3""\n"\n4\n')
    assert [r.id for r in rows_of(path)] == ["1", '2\n"3"\n', "4"]


def test_a_zero_byte_is_text_and_carriage_returns_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,t\r1,a\x00b\r2,c")
    assert [r.values["t"] for r in rows_of(path)] == ["a\x00b", "c"]


def test_setting_columns_are_read_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt,max_tokens,temperature,stop\n1,16,0.5,2\n1,many,,\n")
    first, second = rows_of(path)
    assert first.values == {"prompt": "1", "max_tokens": 16, "temperature": 0.5, "stop": "2"}
    assert second.values["max_tokens"] == "many"


def test_a_header_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b,a\n1,2,3\n")
    with pytest.raises(InputError, match=r"header of .*a\.csv names the column 'a' twice"):
        rows_of(path)
    path.write_bytes(b"a,\xff\n1,2\n")
    with pytest.raises(InputError, match=r"header .*a\.csv line 1 is not UTF-8"):
        rows_of(path)


def test_an_empty_file_has_no_rows_and_long_cells_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"")
    assert rows_of(path) == []
    limit = csv.field_size_limit()
    path.write_bytes(b"a\n" + b"x" * 300_000 + b"\n")
    assert len(rows_of(path)[0].values["a"]) == 300_000
    assert csv.field_size_limit() == limit


CELLS = st.text(st.characters(codec="utf-8"), max_size=5)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=6))
def test_what_the_csv_module_writes_is_read_back(
    rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("c") / "a.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([("a", "b"), *rows])
    assert [tuple(v or "" for v in r.values.values()) for r in rows_of(path)] == rows
