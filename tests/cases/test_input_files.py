"""Folders, addresses and files of other tools: no row is lost, and none is answered in silence.

Each test is a kind of trouble that readers of such files have had.
"""

from __future__ import annotations

import datetime
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def _lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _parquet(path: Path, table: pa.Table, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)


@pytest.fixture
def answer(cli: Any, const: Callable[..., Path]) -> Callable[..., Any]:
    """Runs a job of one token a row."""

    def run(source: object, *options: object, **more: Any) -> Any:
        return cli("run", source, "--model", const("a"), "--max-tokens", 1, *options, **more)

    return run


def test_a_folder_as_spark_writes_it(
    folder: Path, answer: Any, prompt_of: Any, const: Any, files: ModuleType
) -> None:
    """Markers beside the data, partitions with leading zeros, ``9999-12-31`` in 96 bits."""
    never = datetime.datetime(9999, 12, 31)
    for code in ("01001", "2A001", "__HIVE_DEFAULT_PARTITION__"):
        table = pa.table(
            {"id": [f"{code}-1", f"{code}-2"], "until": pa.array([never] * 2, pa.timestamp("us"))}
        )
        path = Path("jobs.parquet", f"code={code}", "_year=2020", "part-0.snappy.parquet")
        _parquet(path, table, use_deprecated_int96_timestamps=True)
    for marker in ("_SUCCESS", ".part-0.crc", "_temporary/0/part-9.parquet", "_metadata"):
        Path("jobs.parquet", marker).parent.mkdir(parents=True, exist_ok=True)
        Path("jobs.parquet", marker).touch()
    template = ["--template", "{{code}}/{{_year}} {{until}}"]
    ran = answer("jobs.parquet", *template, "--keep", "code,_year", "-o", "out.jsonl")
    assert ran.code == 1
    rows = files.read_rows("out.jsonl")
    assert [row["code"] for row in rows] == ["01001"] * 2 + ["2A001"] * 2 + [None] * 2
    assert [row["_year"] for row in rows] == [2020] * 6
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["error"] * 2
    shown = prompt_of("jobs.parquet", *template, "--model", const("a"), "--row", "2A001-1")
    assert shown.endswith("2A001/2020 9999-12-31T00:00:00")


def test_files_of_one_folder_with_columns_of_their_own(
    folder: Path, answer: Any, files: ModuleType
) -> None:
    """Columns that may not be null in their file are missing from another one."""
    required = pa.schema([pa.field("id", pa.string()), pa.field("x", pa.int32(), nullable=False)])
    first = pa.table({"id": ["a"], "x": pa.array([1], pa.int32())}, schema=required)
    second = {"id": ["b"], "y": ["why"], "x": pa.array([2**40]), "s": [{"k": 1, "l": [1]}]}
    third = {"id": ["c"], "s": [{"l": [2], "m": "n"}], "tags": pa.array([["t"]])}
    fourth = {"id": ["d"], "tags": pa.array([["u"]], pa.large_list(pa.string()))}
    for i, table in enumerate((first, *map(pa.table, (second, third, fourth)))):
        _parquet(Path(f"rows/{i}.parquet"), table)
    for ending in ("parquet", "arrow", "jsonl"):
        ran = answer("rows", "--template", "{{id}}", "--keep", "all", "-o", f"out.{ending}")
        assert ran.code == 0, ran.err
        rows = files.read_rows(f"out.{ending}")
        assert [row["x"] for row in rows] == [1, 2**40, None, None]
        assert [row["y"] for row in rows] == [None, "why", None, None]
        assert [row["tags"] for row in rows] == [None, None, ["t"], ["u"]]
        assert rows[1]["s"] == {"k": 1, "l": [1], "m": None}
        assert rows[2]["s"] == {"k": None, "l": [2], "m": "n"}
    ran = answer("rows", "--template", "{{id}}{{y}}", "-o", "o.jsonl")
    assert files.column("o.jsonl", "status") == ["error", "ok", "error", "error"]


def test_types_that_clash_are_refused_before_the_model_is_looked_for(
    folder: Path, cli: Any
) -> None:
    _parquet(Path("rows/a.parquet"), pa.table({"prompt": ["x"], "n": [1]}))
    _parquet(Path("rows/b.parquet"), pa.table({"prompt": ["x"], "n": ["one"]}))
    ran = cli("run", "rows", "--model", "./no-such-model", "-o", "out.jsonl")
    assert ran.code == 2
    assert "'n' is int64 in rows/a.parquet and string in rows/b.parquet" in ran.err


def test_a_dataset_saved_to_disk_is_a_folder(folder: Path, answer: Any, files: ModuleType) -> None:
    rows = [{"id": f"r{i}", "prompt": "x", "n": i} for i in range(5)]
    datasets.Dataset.from_list(rows).save_to_disk("saved", num_shards=2)
    assert sorted(p.suffix for p in Path("saved").iterdir()) == [".arrow"] * 2 + [".json"] * 2
    assert answer("saved", "--keep", "n", "-o", "out.arrow").code == 0
    assert files.column("out.arrow", "n") == [0, 1, 2, 3, 4]


def test_an_output_within_the_folder_that_is_read_is_refused_at_once(
    folder: Path, answer: Any
) -> None:
    """Else the second run would read the answers of the first."""
    _parquet(Path("rows/a.parquet"), pa.table({"prompt": ["x"]}))
    for output in ("rows/out.arrow", "rows/deeper/../out.jsonl"):
        Path("rows/deeper").mkdir(exist_ok=True)
        ran = answer("rows", "-o", output)
        assert ran.code == 2
        assert "lies in the folder rows" in ran.err
    assert answer("rows", "-o", "rows/_out.arrow").code == 0
    assert answer("rows", "-o", "rows/_out.arrow").code == 0


def test_brackets_in_the_names_of_files_and_folders(
    folder: Path, answer: Any, files: ModuleType
) -> None:
    place = Path("strange folder [ my_ID ]")
    place.mkdir()
    (place / "a[1]?.jsonl").write_bytes(_lines({"id": "a", "prompt": "x"}))
    for job in (place / "a[1]?.jsonl", place, f"{place}/*.jsonl", f"{place}/a[[]1]?.jsonl"):
        assert answer(job, "-o", "out.jsonl", "--restart").code == 0
        assert files.column("out.jsonl", "id") == ["a"]


def _skippable(data: bytes) -> bytes:
    """As parallel writers begin their Zstandard files."""
    return b"\x50\x2a\x4d\x18\x04\x00\x00\x00size" + pa.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("name", "data", "num_rows"),
    [
        ("a.jsonl.zst", _skippable(_lines({"prompt": "x"})) * 3, 3),
        ("a.jsonl.zst", pa.compress(b"", codec="zstd", asbytes=True), 0),
        ("a.jsonl.gz", gzip.compress(b""), 0),
        ("a.jsonl.gz", gzip.compress(_lines({"prompt": "x"})) * 2 + bytes(1024), 2),
        ("a.csv.gz", gzip.compress(b"prompt\nx\n") + gzip.compress(b"y\n" * 9000), 9001),
        ("a.tsv.zst", _skippable(b"prompt\tn\n") + _skippable(b"x\t1\ny\t2"), 2),
    ],
    ids=["skipped-frames", "no-zstd", "no-gzip", "padded-members", "csv-members", "tsv-frames"],
)
def test_compressed_files_of_several_parts(
    folder: Path, answer: Any, files: ModuleType, name: str, data: bytes, num_rows: int
) -> None:
    Path(name).write_bytes(data)
    assert answer(name, "-o", "out.arrow").code == 0
    assert files.column("out.arrow", "status") == ["ok"] * num_rows
    if "jsonl" in name:
        assert answer("-", "-o", "piped.arrow", stdin=data).code == 0
        assert files.column("piped.arrow", "status") == ["ok"] * num_rows


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "csv.gz"])
def test_a_cut_compressed_file_is_refused_with_the_last_whole_line(
    folder: Path, answer: Any, ending: str
) -> None:
    prompts = [f"{i * 7919 % 10007} {i}" for i in range(9000)]
    if ending == "csv.gz":
        data = "\n".join(["prompt", *prompts]).encode()
    else:
        data = _lines(*({"prompt": prompt} for prompt in prompts))
    codec = "zstd" if ending.endswith("zst") else "gzip"
    whole = pa.compress(data, codec=codec, asbytes=True)
    Path(f"a.{ending}").write_bytes(whole[: len(whole) * 2 // 3])
    ran = answer(f"a.{ending}", "-o", "out.jsonl")
    assert ran.code == 2
    assert f"a.{ending} is damaged or cut short after line " in ran.err
    assert 1000 < int(ran.err.partition("after line ")[2].partition(":")[0]) < 9000
    assert not Path("out.jsonl").exists()


def test_a_line_that_other_readers_stop_at_costs_one_row(
    folder: Path, answer: Any, files: ModuleType
) -> None:
    """NaN, a number that turns into text late, lists of mixed types, a key first seen late."""
    rows: list[dict[str, Any]] = [{"id": i, "prompt": "x", "n": i} for i in range(200)]
    rows[100]["n"] = float("nan")
    rows[150] |= {"n": "1a", "ner": [[0, 4, "Protein"], {"k": None}]}
    data = _lines(*rows[:120]) + b'{"id": .1}\n' + _lines(*rows[120:])
    Path("jobs.jsonl").write_bytes(data)
    ran = answer("jobs.jsonl", "--keep", "n,ner", "-o", "out.jsonl")
    assert ran.code == 1
    found = files.read_rows("out.jsonl")
    assert [row["status"] for row in found] == ["ok"] * 120 + ["error"] + ["ok"] * 80
    assert "line 121" in found[120]["error"]["message"]
    assert str(found[99]["n"]) == "99"
    assert "1a" in found[151]["n"]
    assert json.loads(json.dumps(found[151]["ner"])) in (
        rows[150]["ner"], json.dumps(rows[150]["ner"], separators=(",", ":")),
    )  # fmt: skip
    assert [row["ner"] for row in found if row["id"] != "150"] == [None] * 200


def test_a_quote_within_a_cell_loses_no_rows_and_an_open_one_is_refused(
    folder: Path, answer: Any, files: ModuleType
) -> None:
    Path("a.csv").write_bytes(b'id,prompt\nv1,abc"\nv2,5" pipe\nv3,x\n')
    assert answer("a.csv", "-o", "out.jsonl").code == 0
    assert files.column("out.jsonl", "id") == ["v1", "v2", "v3"]
    Path("b.csv").write_bytes(b'id,prompt\nv1,"abc\nv2,def\nv3,x\n')
    ran = answer("b.csv", "-o", "b.jsonl")
    assert ran.code == 2
    assert "b.csv line 2: a quote is opened" in ran.err


def test_text_that_is_no_text_in_a_kept_column_stops_no_run(
    folder: Path, answer: Any, files: ModuleType
) -> None:
    """Parquet of other languages holds Latin-1 in columns that it calls strings."""
    text = ["plain", "C\u00d4TE"]
    latin = pa.array([t.encode("latin-1") for t in text])
    broken = pa.Array.from_buffers(pa.string(), 2, latin.buffers())
    table = pa.table({"id": ["a", "b"], "prompt": ["x", "y"], "place": broken})
    _parquet(Path("jobs.parquet"), table)
    for ending in ("jsonl", "csv", "parquet", "arrow"):
        ran = answer("jobs.parquet", "--keep", "place", "-o", f"out.{ending}")
        assert ran.code == 0, ran.err
    for ending in ("jsonl", "parquet", "arrow"):
        assert files.column(f"out.{ending}", "place") == ["plain", "C\ufffdTE"]
    answer("jobs.parquet", "--template", "{{place}}", "-o", "used.jsonl")
    first, second = files.read_rows("used.jsonl")
    assert (first["status"], second["status"]) == ("ok", "error")
    assert "'place'" in second["error"]["message"]


def test_an_arrow_stream_without_its_end_is_told(
    folder: Path, answer: Any, files: ModuleType
) -> None:
    """Readers take the end of the file for the end of the stream, and the rest was never there."""
    table = pa.table({"prompt": ["x"] * 6})
    with pa.ipc.new_stream("a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    whole = Path("a.arrow").read_bytes()
    assert "no mark" not in answer("a.arrow", "-o", "whole.arrow").err
    Path("a.arrow").write_bytes(whole[:-8])
    ran = answer("a.arrow", "-o", "out.arrow")
    assert ran.code == 0
    assert "a.arrow has 6 rows and no mark at its end" in ran.err
    Path("a.arrow").write_bytes(whole[:-30])
    assert answer("a.arrow", "-o", "cut.arrow").code == 2


@pytest.fixture
def store() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("ending", ["jsonl.gz", "parquet"])
def test_a_job_at_an_address_goes_on_where_it_was(
    folder: Path, answer: Any, files: ModuleType, store: Any, ending: str
) -> None:
    def put(*names: str) -> None:
        rows = [{"id": name, "prompt": name, "n": len(name)} for name in names]
        _parquet(Path("t.parquet"), pa.Table.from_pylist(rows))
        data = gzip.compress(_lines(*rows))
        store.pipe(
            f"/b/year=7/1.{ending}", data if "gz" in ending else Path("t.parquet").read_bytes()
        )

    put("a", "bb")
    options = ["--keep", "n,year", "-o", "out.jsonl", "--json"]
    first = answer("memory://b", *options)
    assert (first.code, first.summary["rows"]) == (0, 2), first.err
    assert [(row["n"], row["year"]) for row in files.read_rows("out.jsonl")] == [(1, 7), (2, 7)]
    before = Path("out.jsonl").stat().st_mtime_ns
    assert answer("memory://b", *options).summary["resumed_rows"] == 2
    assert Path("out.jsonl").stat().st_mtime_ns == before
    put("a", "bb", "ccc")
    again = answer("memory://b", *options).summary
    assert (again["rows"], again["resumed_rows"]) == (3, 2)
    assert files.column("out.jsonl", "id") == ["a", "bb", "ccc"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://bucket/rows/*.parquet", "pip install s3fs"),
        ("memory://nowhere.jsonl", "no file memory://nowhere.jsonl"),
        ("nonsense://x", "Protocol not known"),
    ],
)
def test_an_address_out_of_reach_is_refused_before_the_model_is_looked_for(
    folder: Path, cli: Any, address: str, words: str
) -> None:
    ran = cli("run", address, "--model", "./no-such-model", "-o", "out.jsonl")
    assert ran.code == 2
    assert words in ran.err
