"""Which files a folder, a pattern or an odd name stands for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix.errors import InputError
from batchradix.jobs import open_job
from batchradix.jobs.listing import is_below
from batchradix.types import Row


def rows_of(job: Path | str) -> list[Row]:
    with open_job(job) as source:
        return [row for batch in source.batches(None) for row in batch]


def ids(job: Path | str) -> list[Any]:
    return [row.id for row in rows_of(job)]


def put(path: Path, identity: str | None = None) -> Path:
    """A file with one row, whose id is the file's stem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    identity = identity or path.stem
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": [identity]}), path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(path, pa.schema([("id", pa.string())])) as writer:
            writer.write_table(pa.table({"id": [identity]}))
    else:
        path.write_text(f'{{"id": "{identity}"}}\n')
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".arrow"])
def test_a_folder_is_all_its_files_in_order_of_their_paths(tmp_path: Path, suffix: str) -> None:
    for name in ("c", "a", "deep/b", "deep/er/d"):
        put(tmp_path / f"{name}{suffix}")
    for name in (".hidden", "_metadata", "_temporary/x", ".git/y", "out.arrow.batchradix/z"):
        put(tmp_path / f"{name}{suffix}")
    for name in ("_SUCCESS", "README.md", ".part.crc", "dataset_info.json"):
        (tmp_path / name).touch()
    assert ids(tmp_path) == ["a", "c", "b", "d"]
    assert ids(f"{tmp_path}/*{suffix}") == ["a", "c"]
    assert ids(f"{tmp_path}/**/*{suffix}") == ["a", "c", "b", "d"]
    assert ids(f"{tmp_path}/_*{suffix}") == ["_metadata"]
    assert ids(f"{tmp_path}/deep*") == ["b", "d"]


def test_a_folder_of_several_formats_is_refused_with_a_file_of_each(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl")
    put(tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"JSON lines \(.*a\.jsonl\) and Parquet \(.*b\.parquet\)"):
        open_job(tmp_path)


def test_a_folder_named_like_a_file_is_a_folder(tmp_path: Path) -> None:
    """Spark writes jobs.parquet/part-0.parquet."""
    put(tmp_path / "jobs.parquet" / "part-0.parquet")
    put(tmp_path / "more.parquet" / "part-1.parquet")
    assert ids(tmp_path / "jobs.parquet") == ["part-0"]
    assert ids(f"{tmp_path}/*.parquet") == ["part-0", "part-1"]


def test_what_is_reached_twice_is_read_once(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.jsonl")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "z.jsonl").symlink_to("a.jsonl")
    put(tmp_path / "elsewhere" / "b.jsonl")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    for job in (tmp_path / "data", f"{tmp_path}/data/**/*.jsonl", f"{tmp_path}/data/**/**/*.jsonl"):
        assert ids(job) == ["a", "b"]


def test_a_link_to_nothing_or_to_itself_is_no_silent_loss(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl")
    link = tmp_path / "b.jsonl"
    for target in ("gone.jsonl", "b.jsonl"):
        link.symlink_to(target)
        for job in (tmp_path, f"{tmp_path}/*.jsonl", link):
            with pytest.raises(InputError, match=r"b\.jsonl"):
                open_job(job)
        link.unlink()


def test_a_pipe_in_a_folder_is_left_alone(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl")
    os.mkfifo(tmp_path / "b.jsonl")  # opening it would wait for ever
    assert ids(tmp_path) == ids(f"{tmp_path}/*.jsonl") == ["a"]


def test_a_folder_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "a.jsonl")
    put(tmp_path / "shut" / "b.jsonl")
    scandir = os.scandir

    def refuse(place: Any) -> Any:
        if str(place).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(InputError, match=r"folder .*shut cannot be read: Permission denied"):
        open_job(tmp_path)


def test_wildcards_in_names_are_names_where_there_is_such_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "run[1]" / "what?*.jsonl")
    put(tmp_path / "run1" / "other.jsonl")
    assert ids(tmp_path / "run[1]" / "what?*.jsonl") == ["what?*"]
    assert ids(f"{tmp_path}/run[1]/*.jsonl") == ["what?*"]
    assert ids(f"{tmp_path}/run?/*.jsonl") == ["other"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ids("~/run1/other.jsonl") == ids("~/run1/*.jsonl") == ["other"]
    monkeypatch.chdir(tmp_path / "run1")
    assert ids(".") == ids("*.jsonl") == ids("../run1") == ["other"]


def test_folders_that_are_keys_and_values_are_columns(tmp_path: Path) -> None:
    put(tmp_path / "t" / "code=007" / "day=2" / "a.jsonl")
    put(tmp_path / "t" / "code=2A%2F1" / "day=10" / "b.jsonl")
    put(tmp_path / "t" / "code=__HIVE_DEFAULT_PARTITION__" / "c.jsonl")
    (tmp_path / "t" / "code=9").mkdir()
    rows = rows_of(tmp_path / "t")
    assert [list(row.values.items()) for row in rows] == [
        [("id", "a"), ("code", "007"), ("day", 2)],
        [("id", "b"), ("code", "2A/1"), ("day", 10)],
        [("id", "c"), ("code", None)],
    ]
    assert rows_of(tmp_path / "t" / "code=007")[0].values == {"id": "a", "day": 2}
    assert rows_of(f"{tmp_path}/t/code=0*/*/*.jsonl")[0].values["code"] == "007"
    (file,) = (tmp_path / "t" / "code=007" / "day=2").iterdir()
    assert rows_of(file)[0].values == {"id": "a"}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_files_own_column_goes_before_its_folders(tmp_path: Path, suffix: str) -> None:
    put(tmp_path / "id=x" / f"a{suffix}", "mine")
    assert ids(tmp_path) == ["mine"]


def test_a_kept_key_alone_decodes_no_column(tmp_path: Path) -> None:
    path = put(tmp_path / "year=2024" / "a.parquet")
    with open_job(tmp_path) as source:
        assert source.columns == ("id", "year")
        (batch,) = source.keep_batches(["year"])
        assert batch.to_pylist() == [{"year": 2024}]
        (rows,) = source.batches(["year"])
        assert [(row.id, row.values) for row in rows] == [("a", {"year": 2024})]
    assert path.exists()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([1], pa.int64()), pa.array([2**64 - 1], pa.uint64())),
        (pa.array([1], pa.int64()), pa.array([1.5])),
        (pa.array([1], pa.int64()), pa.array(["x"])),
        (pa.array(["x"]), pa.array([b"x"])),
        (pa.array([b"x"]), pa.array(["x"])),
        (pa.array([{"a": 1}]), pa.array([{"a": "x"}])),
        (pa.array([[{"a": 1}]]), pa.array([[{"b": 2, "a": 0.5}]])),
    ],
)
def test_types_that_clash_are_refused_with_both_files(
    tmp_path: Path, first: pa.Array, second: pa.Array
) -> None:
    pq.write_table(pa.table({"c": first}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"c": second}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"'c' is .* in .*a\.parquet and .* in .*b\.parquet"):
        open_job(tmp_path)


def test_structs_gain_fields_and_nulls_gain_types(tmp_path: Path) -> None:
    first = pa.table({"s": [{"a": 1}], "n": pa.nulls(1), "d": pa.array([1], pa.int8())})
    second = pa.table({"s": [{"b": "x", "a": 2}], "n": ["late"], "d": pa.array([2**40])})
    pq.write_table(first, tmp_path / "a.parquet")
    pq.write_table(second, tmp_path / "b.parquet")
    with open_job(tmp_path) as source:
        kept = pa.Table.from_batches(source.keep_batches("all")).to_pylist()
        assert kept == [
            {"s": {"a": 1, "b": None}, "n": None, "d": 1},
            {"s": {"a": 2, "b": "x"}, "n": "late", "d": 2**40},
        ]
        rows = [row.values for batch in source.batches(["s"]) for row in batch]
        assert rows == [{"s": {"a": 1}}, {"s": {"b": "x", "a": 2}}]


def test_a_time_that_a_finer_unit_cannot_hold_is_refused_by_column(tmp_path: Path) -> None:
    for name, unit, value in (("a", "s", 10**12), ("b", "ns", 1)):
        table = pa.table({"at": pa.array([value], pa.timestamp(unit))})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    with open_job(tmp_path) as source, pytest.raises(InputError, match=r"'at' .* cannot be kept"):
        list(source.keep_batches("all"))


def test_an_output_among_the_files_of_a_folder_is_known(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("deep")
    for inside in ("out.arrow", "deep/out.jsonl", "link/out.csv", "deep/../out.pq"):
        assert is_below(tmp_path, tmp_path / inside)
    for elsewhere in ("_out/o.arrow", "../x.arrow", "o.txt", "/o.arrow"):
        assert not is_below(tmp_path, tmp_path / elsewhere)
