"""Every file format against pyarrow's own reading of the same file."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from batchradix.jobs import open_job

TEXT = st.text(st.characters(codec="utf-8"), max_size=6)


def integers(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    lowest = -(2 ** (bits - 1)) if signed else 0
    return st.integers(lowest, lowest + 2**bits - 1)


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**digits - 1
    exact = Context(prec=digits + 1)
    return st.integers(-most, most).map(lambda n: Decimal(n).scaleb(-scale, exact))


MOMENTS = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    (pa.int8(), integers(8, signed=True)),
    (pa.int64(), integers(64, signed=True)),
    (pa.uint32(), integers(32, signed=False)),
    (pa.uint64(), integers(64, signed=False)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.decimal128(38, 7), decimals(38, 7)),
    (pa.decimal256(76, 0), decimals(76, 0)),
    (pa.date32(), st.dates()),
    (pa.timestamp("ms"), MOMENTS.map(lambda m: m.replace(microsecond=5000))),
    (pa.timestamp("us"), MOMENTS),
    (pa.time64("us"), st.times()),
    (pa.duration("us"), st.timedeltas(timedelta(-9999), timedelta(9999))),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.string_view(), TEXT),
    (pa.binary(), st.binary(max_size=6)),
    (pa.binary_view(), st.binary(max_size=20)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
]


@st.composite
def typed(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """A type and its values, nulls among them."""
    kind = draw(st.sampled_from(["leaf", "leaf", "list", "large", "struct", "map"]))
    if kind == "leaf" or depth == 0:
        type_, values = draw(st.sampled_from(LEAVES))
        return type_, st.none() | values
    type_, values = draw(typed(depth - 1))
    if kind == "struct":
        other, others = draw(typed(depth - 1))
        fields = st.fixed_dictionaries({"a": values, "b.c": others})
        return pa.struct([("a", type_), ("b.c", other)]), st.none() | fields
    if kind == "map":
        pairs = st.dictionaries(TEXT, values, max_size=2).map(lambda d: list(d.items()))
        return pa.map_(pa.string(), type_), st.none() | pairs
    make = pa.large_list if kind == "large" else pa.list_
    return make(type_), st.none() | st.lists(values, max_size=2)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    num_rows = draw(st.integers(0, 8))
    columns = {"id": pa.array([f"r{i}" for i in range(num_rows)], pa.string())}
    for name in ("a", "b", "a.b")[: draw(st.integers(0, 3))]:
        type_, values = draw(typed())
        column = draw(st.lists(values, min_size=num_rows, max_size=num_rows))
        columns[name] = pa.array(column, type_)
    words = draw(st.lists(st.sampled_from(["x", "yy", None]), min_size=num_rows, max_size=num_rows))
    columns["word"] = pa.array(words, pa.string()).dictionary_encode()
    return pa.table(columns)


def write_parquet(table: pa.Table, path: Path, rows: int) -> pa.Table:
    try:
        pq.write_table(table, path.with_suffix(".parquet"), row_group_size=rows)
    except pa.ArrowNotImplementedError:  # views within other types, in some versions
        reject()
    return pq.read_table(path.with_suffix(".parquet"))


def write_ipc(table: pa.Table, path: Path, rows: int) -> pa.Table:
    with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    with pa.ipc.open_file(path.with_suffix(".arrow")) as reader:
        return reader.read_all()


def write_stream(table: pa.Table, path: Path, rows: int) -> pa.Table:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(path.with_suffix(".feather"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    with pa.ipc.open_stream(path.with_suffix(".feather")) as reader:
        return reader.read_all()


def shown(value: Any, type_: pa.DataType) -> Any:
    """What pyarrow reads, as a prompt is to show it: maps as dicts, floats of 32 bits as they are
    written."""
    if value is None:
        return None
    if pa.types.is_float32(type_):
        return float(str(np.float32(value)))
    if pa.types.is_map(type_):
        return {k: shown(v, type_.item_type) for k, v in value}
    if pa.types.is_struct(type_):
        return {f.name: shown(value[f.name], f.type) for f in type_.fields}
    if isinstance(value, list):
        return [shown(v, type_.value_type) for v in value]
    return value


@pytest.mark.parametrize("write", [write_parquet, write_ipc, write_stream])
@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(table=tables(), group_rows=st.integers(1, 4), batch_rows=st.integers(1, 5))
def test_typed_files_read_as_pyarrow_reads_them(
    write: Callable[[pa.Table, Path, int], pa.Table],
    table: pa.Table,
    group_rows: int,
    batch_rows: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("t")
    theirs = write(table, folder / "t", group_rows)
    fields = list(theirs.schema)
    with open_job(folder) as source:
        rows = [row for batch in source.batches(None, batch_rows) for row in batch]
        assert [row.error for row in rows] == [None] * len(theirs)
        for row, expected in zip(rows, theirs.to_pylist(), strict=True):
            assert row.values == {f.name: shown(expected[f.name], f.type) for f in fields}
        kept = pa.Table.from_batches(
            source.keep_batches("all", batch_rows), source.keep_schema("all")
        )
        assert kept.to_pylist() == theirs.drop_columns("id").to_pylist()
        kept.validate(full=True)


NUMBERS = st.integers(-(2**63), 2**63 - 1)
RECORDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "n": (pa.int64(), NUMBERS),
    "x": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "t": (pa.string(), st.text(st.characters(codec="utf-8"), max_size=20)),
    "b": (pa.bool_(), st.booleans()),
    "l": (pa.list_(pa.int64()), st.lists(st.none() | NUMBERS, max_size=3)),
    "o": (
        pa.struct([("k", pa.string()), ("m", pa.list_(pa.struct([("z", pa.float64())])))]),
        st.fixed_dictionaries(
            {"k": TEXT, "m": st.lists(st.fixed_dictionaries({"z": st.none() | st.floats(0, 1)}))}
        ),
    ),
}


def gzip_members(data: bytes, cut: int) -> bytes:
    return gzip.compress(data[:cut]) + gzip.compress(data[cut:])


def zstandard_frames(data: bytes, cut: int) -> bytes:
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0size"
    frames = [pa.compress(part, codec="zstd", asbytes=True) for part in (data[:cut], data[cut:])]
    return skipped + b"".join(frames)


def as_it_is(data: bytes, cut: int) -> bytes:
    return data


PACKED = st.sampled_from([("", as_it_is), (".gz", gzip_members), (".zst", zstandard_frames)])


@settings(deadline=None, max_examples=80)
@given(
    records=st.lists(
        st.fixed_dictionaries({}, optional={k: st.none() | v for k, (_, v) in RECORDS.items()}),
        max_size=8,
    ),
    is_ascii=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    packed=PACKED,
    cut=st.integers(0, 500),
)
def test_json_lines_read_as_pyarrow_reads_them(
    records: list[dict[str, Any]],
    is_ascii: bool,
    end: str,
    packed: tuple[str, Callable[[bytes, int], bytes]],
    cut: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data = "".join(json.dumps(r, ensure_ascii=is_ascii) + end for r in records).encode()
    suffix, pack = packed
    folder = tmp_path_factory.mktemp("j")
    (folder / f"j.jsonl{suffix}").write_bytes(pack(data, cut))
    schema = pa.schema([(name, type_) for name, (type_, _) in RECORDS.items()])
    options = pa.json.ParseOptions(explicit_schema=schema)
    theirs = []
    if records:
        theirs = pa.json.read_json(pa.BufferReader(data), parse_options=options).to_pylist()
    with open_job(folder) as source:
        rows = [row for batch in source.batches(None) for row in batch]
        nothing = dict.fromkeys(RECORDS)
        assert [nothing | row.values for row in rows] == theirs
        scalars = [c for c in source.columns or () if c not in ("l", "o", "x")]
        kept = pa.Table.from_batches(source.keep_batches(scalars), source.keep_schema(scalars))
        assert kept.to_pylist() == [{c: row[c] for c in scalars} for row in theirs]


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(
        st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)] * 3)
    ),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    end=st.sampled_from(["\n", "\r\n"]),
    name=st.sampled_from(["c.csv", "c.tsv"]),
    packed=PACKED,
    cut=st.integers(0, 100),
)
def test_csv_reads_as_pyarrow_reads_it(
    rows: list[tuple[str, ...]],
    quoting: Any,
    end: str,
    name: str,
    packed: tuple[str, Callable[[bytes, int], bytes]],
    cut: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("c")
    delimiter = "," if name == "c.csv" else "\t"
    plain = folder / "plain"
    if any("\r" in cell for row in rows for cell in row):
        quoting = csv.QUOTE_ALL  # Python 3.11 leaves it bare otherwise
    with plain.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter, quoting=quoting, lineterminator=end)
        writer.writerows([("a", "b", "c"), *rows])
    suffix, pack = packed
    (folder / f"{name}{suffix}").write_bytes(pack(plain.read_bytes(), cut))
    theirs = pa.csv.read_csv(
        plain,
        parse_options=pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types=dict.fromkeys("abc", pa.string()),
            strings_can_be_null=True,
            null_values=[""],
        ),
    ).to_pylist()
    with open_job(folder) as source:
        ours = [row.values for batch in source.batches(None) for row in batch]
        assert ours == theirs
        if theirs:
            assert pa.Table.from_batches(source.keep_batches("all")).to_pylist() == theirs


KEYS = st.none() | st.text("abc /=%ü", min_size=1, max_size=4)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.lists(st.tuples(st.integers(-20, 3000), KEYS), min_size=1, max_size=6),
    format_=st.sampled_from(["parquet", "arrow", "csv"]),
)
def test_partitions_read_as_pyarrow_reads_them(
    rows: list[tuple[int, str | None]],
    format_: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("h")
    table = pa.table(
        {
            "id": [f"r{i}" for i in range(len(rows))],
            "year": pa.array([year for year, _ in rows], pa.int32()),
            "key": pa.array([key for _, key in rows], pa.string()),
        }
    )
    hive = ds.partitioning(table.select(["year", "key"]).schema, flavor="hive")
    ds.write_dataset(table, folder, format=format_, partitioning=hive)
    theirs = ds.dataset(folder, format=format_, partitioning=hive).to_table()
    expected = sorted(theirs.to_pylist(), key=lambda row: str(row["id"]))
    for job in (folder, f"{folder}/**/*.{format_}", f"{folder}/year=*"):
        with open_job(job) as source:
            ours = [row.values for batch in source.batches(None) for row in batch]
            assert sorted(ours, key=lambda row: str(row["id"])) == expected
            assert source.keep_schema(["year", "key"]).types == [pa.int64(), pa.string()]


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(first=tables(), second=tables(), order=st.permutations(["a", "b", "a.b", "word"]))
def test_files_with_different_columns_are_joined_as_pyarrow_joins_them(
    first: pa.Table,
    second: pa.Table,
    order: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("d")
    second = second.select(["id", *[c for c in order if c in second.schema.names]])
    for column in set(first.schema.names) & set(second.schema.names) - {"id"}:
        if first.schema.field(column).type != second.schema.field(column).type:
            second = second.rename_columns([c + "2" * (c == column) for c in second.schema.names])
    theirs = pa.concat_tables(
        [
            write_parquet(first, folder / "a", 3),
            write_parquet(second, folder / "b", 2),
        ],
        promote_options="default",
    )
    with open_job(folder) as source:
        assert source.columns == tuple(theirs.schema.names)
        kept = pa.Table.from_batches(source.own_batches(), source.own_schema())
        assert kept.to_pylist() == theirs.to_pylist()


def test_times_in_96_bits_keep_their_years(tmp_path: Path) -> None:
    """Spark writes them so, and 9999-12-31 for "never"; nanoseconds would wrap that around."""
    moments = [datetime(9999, 12, 31), datetime(1, 1, 1), datetime(2024, 2, 29, 1, 2, 3, 4), None]
    table = pa.table({"at": pa.array(moments, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    with open_job(tmp_path) as source:
        assert [row.values["at"] for batch in source.batches(None) for row in batch] == moments
        assert pa.Table.from_batches(source.keep_batches("all"))["at"].to_pylist() == moments


def test_days_and_times_of_day_are_pythons_own(tmp_path: Path) -> None:
    table = pa.table({"d": [date(2024, 2, 29)], "t": [time(1, 2, 3)], "p": [timedelta(1, 2, 3)]})
    pq.write_table(table, tmp_path / "t.parquet")
    with open_job(tmp_path) as source:
        (row,) = next(source.batches(None))
        assert row.values == table.to_pylist()[0]
