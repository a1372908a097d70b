"""Parquet, Arrow files and tables: the same rows and columns as pyarrow reads, streamed."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.errors import InputError, RowErrorCode
from batchradix.jobs import JobSource, open_job
from batchradix.jobs.arrow_values import Unreadable, to_python
from batchradix.types import Row

INFO = pa.struct([("sku", pa.large_string()), ("dims", pa.list_(pa.float32()))])


def all_rows(source: JobSource, columns: list[str] | None = None, n: int = 1024) -> list[Row]:
    return [row for batch in source.batches(columns, n) for row in batch]


def part(ids: list[str], colours: list[str | None], skus: list[str | None]) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(ids, pa.large_string()),
            "colour": pa.array(colours).dictionary_encode(),
            "info": pa.array([s and {"sku": s, "dims": [1.5]} for s in skus], INFO),
        }
    )


@pytest.fixture
def dictionaries(tmp_path: Path) -> Path:
    first = part(["e0", "e1", "e2"], ["red", "blue", "green"], ["A1", "B2", "A1"])
    second = part(["e3", "e4", "e5"], ["blue", "red", None], [None, "C3", "A1"])
    path = tmp_path / "jobs.parquet"
    with pq.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        writer.write_table(second)
    return path


def test_each_row_group_is_read_with_its_own_dictionary(dictionaries: Path) -> None:
    with open_job(dictionaries) as source:
        rows = all_rows(source, ["colour", "info"])
        assert [r.id for r in rows] == ["e0", "e1", "e2", "e3", "e4", "e5"]
        colours = ["red", "blue", "green", "blue", "red", None]
        assert [r.values["colour"] for r in rows] == colours
        assert rows[0].values["info"] == {"sku": "A1", "dims": [1.5]}
        assert rows[3].values["info"] is None
        assert source.id_type == pa.string()
        assert source.keep_schema("all").field("colour").type == pa.string()
        kept = pa.Table.from_batches(source.keep_batches("all"))
        assert kept["colour"].to_pylist() == colours
        assert kept.schema.field("info").type == INFO


SAMPLES: list[tuple[pa.DataType, Any]] = [
    (pa.string(), "naïve"),
    (pa.large_string(), "x"),
    (pa.int64(), 9007199254740993),
    (pa.uint64(), 18446744073709551615),
    (pa.float32(), 1.5),
    (pa.bool_(), True),
    (pa.decimal128(20, 3), Decimal("1.250")),
    (pa.date32(), date(2024, 2, 29)),
    (pa.timestamp("us", "UTC"), datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=UTC)),
    (pa.binary(), b"\xff\x00"),
    (pa.list_(pa.int8()), [1, None, 3]),
    (pa.struct([("a", pa.list_(pa.struct([("b", pa.string())])))]), {"a": [{"b": "c"}]}),
    (pa.dictionary(pa.int8(), pa.string()), "red"),
]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    num_rows = draw(st.integers(0, 12))
    chosen = draw(st.lists(st.sampled_from(SAMPLES), max_size=4))
    names = ["id", "a", "a.b", "c"]
    columns = {}
    for name, (type_, sample) in zip(names, chosen, strict=False):
        if name == "id" and (pa.types.is_nested(type_) or pa.types.is_binary(type_)):
            name = "no_id"
        holes = draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
        columns[name] = pa.array([None if h else sample for h in holes], type_)
    columns["n"] = pa.array(range(num_rows), pa.int32())
    return pa.table(columns)


def write_parquet(table: pa.Table, path: Path, rows: int) -> Path:
    path = path / "t.parquet"
    pq.write_table(table, path, row_group_size=rows)
    return path


def write_ipc(table: pa.Table, path: Path, rows: int) -> Path:
    path = path / "t.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table.unify_dictionaries(), max_chunksize=rows)
    return path


def write_stream(table: pa.Table, path: Path, rows: int) -> Path:
    path = path / "s.arrow"
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def in_memory(table: pa.Table, _path: Path, rows: int) -> pa.Table:
    return pa.Table.from_batches(table.to_batches(max_chunksize=rows), table.schema)


@pytest.mark.parametrize("write", [write_parquet, write_ipc, write_stream, in_memory])
@settings(deadline=None, max_examples=40)
@given(
    table=tables(),
    group_rows=st.integers(1, 6),
    batch_rows=st.integers(1, 5),
    limit=st.none() | st.integers(0, 15),
)
def test_rows_and_kept_columns_are_what_pyarrow_reads(
    write: Callable[[pa.Table, Path, int], Any],
    table: pa.Table,
    group_rows: int,
    batch_rows: int,
    limit: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    job = write(table, tmp_path_factory.mktemp("t"), group_rows)
    expected = table.slice(0, limit).to_pylist()
    with open_job(job, limit=limit) as source:
        assert source.columns == tuple(table.schema.names)
        for _ in range(2):
            rows = all_rows(source, None, batch_rows)
            assert [r.values for r in rows] == expected
            assert [r.index for r in rows] == list(range(len(expected)))
        assert source.num_rows == len(expected)
        assert all(0 < len(b) <= batch_rows for b in source.batches(["n"], batch_rows))
        assert [r.values for r in all_rows(source, [])] == [{}] * len(expected)
        if source.id_column is None:
            assert [r.id for r in rows] == [str(i) for i in range(len(expected))]
        else:
            assert [r.id for r in rows] == [e["id"] for e in expected]
            assert pa.array([r.id for r in rows], source.id_type).to_pylist() == [
                e["id"] for e in expected
            ]
        schema = source.keep_schema("all")
        kept = pa.Table.from_batches(source.keep_batches("all", batch_rows), schema)
        assert kept.to_pylist() == [{k: v for k, v in e.items() if k != "id"} for e in expected]


def test_columns_with_dots_are_names_and_not_paths(tmp_path: Path) -> None:
    table = pa.table({"a": [{"b": 1}], "a.b": [2]})
    with open_job(write_parquet(table, tmp_path, 1)) as source:
        assert all_rows(source, ["a.b"])[0].values == {"a.b": 2}
        assert all_rows(source, ["a"])[0].values == {"a": {"b": 1}}


def test_a_wide_file_is_not_asked_for_its_schema_once_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wide.parquet"
    pq.write_table(pa.table({f"c{i}": [i] for i in range(300)}), path)
    real, num_asked = pq.ParquetFile.schema_arrow, 0

    def counted(self: pq.ParquetFile) -> pa.Schema:
        nonlocal num_asked
        num_asked += 1
        return real.__get__(self)

    monkeypatch.setattr(pq.ParquetFile, "schema_arrow", property(counted))
    with open_job(path) as source:
        assert sum(b.num_columns for b in source.keep_batches("all")) == 300
        assert len(all_rows(source)[0].values) == 300
    assert num_asked < 10


def test_a_column_nobody_wants_is_never_decoded(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"id": ["a", "b"], "text": ["x", "y"], "big": ["q" * 5000, "r" * 5000]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    chunk = pq.read_metadata(path).row_group(0).column(2)
    damaged = bytearray(path.read_bytes())
    start = chunk.data_page_offset
    damaged[start : start + 64] = b"\xff" * 64
    path.write_bytes(damaged)
    with open_job(path) as source:
        assert [r.values for r in all_rows(source, ["text"])] == [{"text": "x"}, {"text": "y"}]
        with pytest.raises(InputError, match=r"t\.parquet is damaged.* row group 0"):
            all_rows(source, ["big"])


def test_big_values_come_in_small_batches_even_behind_a_dictionary(tmp_path: Path) -> None:
    big = "x" * (9 << 20)
    table = pa.table({"id": [str(i) for i in range(8)], "big": [big] * 8})
    path = tmp_path / "t.parquet"
    pq.write_table(table, path, compression="zstd")
    with open_job(path) as source:
        kept = [b.num_rows for b in source.keep_batches(["big"])]
        assert max(kept) <= 3
        assert sum(kept) == 8
    with open_job(table) as source:
        assert max(b.num_rows for b in source.keep_batches(["big"])) <= 3


def test_small_row_groups_are_joined_into_full_batches(tmp_path: Path) -> None:
    path = write_parquet(pa.table({"a": range(10)}), tmp_path, 1)
    with open_job(path) as source:
        assert [len(b) for b in source.batches(["a"], 4)] == [4, 4, 2]


def test_nanoseconds_do_not_get_lost_and_do_not_depend_on_pandas() -> None:
    exact = pa.array([1_000, None], pa.timestamp("ns"))
    assert to_python(exact) == [datetime(1970, 1, 1, microsecond=1), None]
    assert type(to_python(exact)[0]) is datetime
    assert to_python(pa.array([1], pa.timestamp("ns"))) == ["1970-01-01 00:00:00.000000001"]
    assert to_python(pa.array([1], pa.time64("ns"))) == ["00:00:00.000000001"]
    nested = pa.array([[{"t": 1}]], pa.list_(pa.struct([("t", pa.timestamp("ns"))])))
    assert to_python(nested) == [[{"t": "1970-01-01 00:00:00.000000001"}]]


def test_encodings_views_maps_and_uuids_become_plain_values() -> None:
    colours = pa.array(["u", "v", None]).dictionary_encode()
    unique = uuid.UUID(int=7)
    assert to_python(pa.StructArray.from_arrays([colours], ["x"])) == [
        {"x": "u"},
        {"x": "v"},
        {"x": None},
    ]
    assert to_python(pc.run_end_encode(pa.array(["a", "a", "b"]))) == ["a", "a", "b"]
    assert to_python(pa.array(["a"], pa.string_view())) == ["a"]
    assert to_python(pa.array([["a"], None], pa.list_view(pa.string()))) == [["a"], None]
    assert to_python(pa.array([unique.bytes, None], pa.uuid())) == [str(unique), None]
    nested = pa.map_(pa.string(), pa.map_(pa.string(), pa.int8()))
    assert to_python(pa.array([[("k", [("j", 1)])], None], nested)) == [{"k": {"j": 1}}, None]
    assert to_python(pa.array([[[("k", 1)]]], pa.list_(pa.map_(pa.string(), pa.int8())))) == [
        [{"k": 1}]
    ]


def test_a_value_python_cannot_hold_spoils_its_own_row_only() -> None:
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    text = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffb")])
    with open_job(pa.table({"id": ["x", "y", "z"], "t": text})) as source:
        rows = all_rows(source, ["t"])
        assert [r.error and r.error.code for r in rows] == [None, RowErrorCode.BAD_VALUE, None]
        assert rows[1].error is not None
        assert "row 1: the column 't'" in rows[1].error.message
        assert [r.values for r in rows] == [{"t": "a"}, {}, {"t": "b"}]
    nowhere = to_python(pa.array([0, None], pa.timestamp("us", "Nowhere/At_All")))
    assert isinstance(nowhere[0], Unreadable)
    assert nowhere[1] is None
    far = to_python(pa.array([0, 10**15], pa.timestamp("s")))
    assert far[0] == datetime(1970, 1, 1)
    assert isinstance(far[1], Unreadable)


@pytest.mark.parametrize(
    ("ids", "type_", "first"),
    [
        (pa.array([9007199254740993], pa.int64()), pa.int64(), 9007199254740993),
        (pa.array([5], pa.uint64()).dictionary_encode(), pa.uint64(), 5),
        (pa.array([date(2024, 1, 1)]), pa.date32(), date(2024, 1, 1)),
        (pa.array([1], pa.timestamp("ns")), pa.string(), "1970-01-01 00:00:00.000000001"),
        (pa.array([uuid.UUID(int=1).bytes], pa.uuid()), pa.string(), str(uuid.UUID(int=1))),
        (pa.nulls(1), pa.string(), None),
    ],
)
def test_ids_keep_their_type_where_it_is_a_plain_one(
    ids: pa.Array, type_: pa.DataType, first: object
) -> None:
    with open_job(pa.table({"id": ids})) as source:
        (row,) = all_rows(source)
        assert (source.id_type, row.id) == (type_, first)


@pytest.mark.parametrize("ids", [pa.array([[1]]), pa.array([{"a": 1}]), pa.array([b"x"])])
def test_nested_and_binary_id_columns_are_refused(ids: pa.Array) -> None:
    with pytest.raises(InputError, match="id column 'id'"):
        open_job(pa.table({"id": ids}))


def test_a_missing_id_column_is_refused_with_the_columns_there_are(dictionaries: Path) -> None:
    with pytest.raises(InputError, match=r"no column 'key' .* id, colour, info"):
        open_job(dictionaries, id_column="key")
    with open_job(dictionaries, id_column="colour") as source:
        assert [r.id for r in all_rows(source, ["id"])][-1] is None
        assert source.num_duplicate_ids == 2


def test_kept_columns_that_do_not_exist_or_collide_are_refused(dictionaries: Path) -> None:
    with open_job(dictionaries) as source:
        with pytest.raises(InputError, match=r"no column 'size' to keep; .* id, colour, info"):
            source.keep_schema(["colour", "size"])
        assert source.keep_schema(["id", "colour", "colour"]).names == ["colour"]
    table = pa.table({"key": [1], "id": [2], "text": [3], "input_text": [4]})
    with open_job(table, id_column="key") as source:
        with pytest.raises(InputError, match=r"'text' .* rename it"):
            source.keep_schema(["text"])
        with pytest.raises(InputError, match=r"'id' .* rename it"):
            source.keep_schema(["id"])
        (kept,) = source.keep_batches("all")
        assert kept.to_pylist() == [
            {"key": 1, "input_id": 2, "input_input_text": 3, "input_text": 4}
        ]


def test_a_type_no_file_can_hold_is_refused_before_anything_runs() -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array(["x"])])
    with open_job(pa.table({"u": union, "a": [1]})) as source:
        with pytest.raises(InputError, match="'u'"):
            source.keep_schema("all")
        assert source.keep_schema(["a"]).names == ["a"]


def test_two_columns_of_one_name_are_refused() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(InputError, match="more than one column named 'a'"):
        open_job(table)


def test_a_folder_of_parquet_files_is_one_table_in_order_of_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["c"], "n": pa.array([3], pa.int64())}), tmp_path / "b.parquet")
    pq.write_table(
        pa.table(
            {"id": pa.array(["a", "b"]).dictionary_encode(), "n": pa.array([1, 2], pa.int8())}
        ),
        tmp_path / "a.parquet",
    )
    pq.write_table(pa.table({"id": ["d"], "x": [0]}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"other": [1]}), tmp_path / "_metadata.parquet")
    (tmp_path / "_SUCCESS").touch()
    for job in (tmp_path, tmp_path / "[abc].parquet"):
        with open_job(job) as source:
            rows = all_rows(source)
            assert [r.id for r in rows] == ["a", "b", "c", "d"]
            assert rows[3].values == {"id": "d", "x": 0}
            assert source.keep_schema("all") == pa.schema([("n", pa.int64()), ("x", pa.int64())])
            kept = pa.Table.from_batches(source.keep_batches("all"))
            assert kept.to_pylist()[2:] == [{"n": 3, "x": None}, {"n": None, "x": 0}]
        with open_job(job, limit=3) as source:
            assert [r.id for r in all_rows(source, [])] == ["a", "b", "c"]


def test_files_whose_types_would_round_or_clash_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([1], pa.int64())}), tmp_path / "a.parquet")
    for other in (pa.array([1.5]), pa.array(["x"])):
        pq.write_table(pa.table({"id": other}), tmp_path / "b.parquet")
        with pytest.raises(InputError, match=r"'id' is int64 in .*a\.parquet and .*b\.parquet"):
            open_job(tmp_path)


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.99])
def test_a_parquet_or_arrow_file_cut_short_is_refused_by_name(tmp_path: Path, cut: float) -> None:
    table = pa.table({"id": range(1000)})
    for path in (write_parquet(table, tmp_path, 100), write_ipc(table, tmp_path, 100)):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * cut)])
        with pytest.raises(InputError, match=path.name):
            open_job(path)


def test_a_stream_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    path = write_stream(pa.table({"id": range(1000)}), tmp_path, 100)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(InputError, match=r"s\.arrow"):
        open_job(path)


def test_arrow_text_with_broken_offsets_is_refused_and_does_not_crash(tmp_path: Path) -> None:
    path = write_ipc(pa.table({"a": ["abcdefgh", "ijklmnop"]}), tmp_path, 10)
    data = path.read_bytes()
    offsets = (0).to_bytes(4, "little") + (8).to_bytes(4, "little") + (16).to_bytes(4, "little")
    broken = offsets[:4] + (2**31 - 9).to_bytes(4, "little") + offsets[8:]
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, broken))
    with open_job(path) as source, pytest.raises(InputError, match=r"t\.arrow is damaged"):
        all_rows(source)


def not_utf8(type_: pa.DataType) -> pa.Array:
    """Two texts of which the second is b"\\xff", in a string column or below one."""
    offsets = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")])
    if pa.types.is_list(type_):
        return pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), text)
    if pa.types.is_struct(type_):
        return pa.StructArray.from_arrays([text, pa.array([b"\xfe", None])], ["t", "b"])
    return text


@pytest.mark.parametrize("write", [write_parquet, write_ipc, in_memory])
@pytest.mark.parametrize(
    ("type_", "kept"),
    [
        (pa.string(), "\ufffd"),
        (pa.list_(pa.string()), ["\ufffd"]),
        (pa.struct([("t", pa.string()), ("b", pa.binary())]), {"t": "\ufffd", "b": None}),
    ],
)
def test_text_that_is_not_utf8_is_its_rows_error_and_mended_where_only_kept(
    write: Callable[[pa.Table, Path, int], Any], type_: pa.DataType, kept: Any, tmp_path: Path
) -> None:
    table = pa.table({"id": ["x", "y"], "c": not_utf8(type_)})
    with open_job(write(table, tmp_path, 1)) as source:
        first, second = all_rows(source, ["c"])
        assert first.error is None
        assert second.error is not None
        assert "row 1: the column 'c' cannot be read: its text is not UTF-8" in second.error.message
        assert [row.error for row in all_rows(source, [])] == [None, None]
        batches = pa.Table.from_batches(source.keep_batches("all"))
        batches.validate(full=True)
        assert batches["c"].to_pylist()[1] == kept


def test_a_parquet_file_replaced_between_passes_is_refused(tmp_path: Path) -> None:
    path = write_parquet(pa.table({"a": [1, 2]}), tmp_path, 2)
    with open_job(path) as source:
        write_parquet(pa.table({"a": [1, 2, 3, 4]}), tmp_path, 2)
        for columns in (["a"], []):
            with pytest.raises(InputError, match="changed"):
                all_rows(source, columns)


def test_a_nested_column_too_big_for_one_batch_is_read_in_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow cannot give more than 2 GiB of a nested column at once, which an average row need
    not tell: here it stands for more than three of the big rows."""
    rows = [{"l": [{"t": "x" * (100 if i >= 40 else 1)}]} for i in range(50)]
    path = write_parquet(pa.Table.from_pylist(rows), tmp_path, 50)
    real = pq.ParquetFile.iter_batches

    def limited(self: pq.ParquetFile, batch_size: int, **options: Any) -> Any:
        for batch in real(self, batch_size=batch_size, **options):
            if batch.num_columns and batch.nbytes > 400:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented")
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", limited)
    with open_job(path) as source:
        assert [row.values for row in all_rows(source, None, 20)] == rows
        monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: broken())
        with pytest.raises(InputError, match=r"t\.parquet .* Nested"):
            all_rows(source)


def broken() -> Any:
    raise pa.ArrowNotImplementedError("Nested data conversions not implemented")
    yield


def test_a_struct_of_nulls_beside_views_is_read_and_kept_wherever_batches_are_cut(
    tmp_path: Path,
) -> None:
    nothing = pa.struct([("x", pa.null()), ("y", pa.null())])
    kind = pa.struct([("text", pa.string_view()), ("nothing", nothing)])
    values = [None] * 5 + [{"text": "t", "nothing": {"x": None, "y": None}}, None]
    table = pa.table({"a": pa.array(values, kind)})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    with open_job(tmp_path / "t.arrow") as source:
        rows = [row for batch in source.batches(None, 1) for row in batch]
        assert [row.values.get("a") for row in rows] == values
        kept = pa.Table.from_batches(source.keep_batches("all", 1), source.keep_schema("all"))
    assert kept["a"].to_pylist() == values
