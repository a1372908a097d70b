"""Addresses: the same rows as local files, copied or read in parts, and errors in one sentence."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from hub_stand_in import HubStandIn

from batchradix.errors import InputError
from batchradix.jobs import open_job

LINES = b'{"id": "a", "t": 1}\n{"id": "b"}\n'


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def arrow(*texts: str) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, pa.schema([("id", pa.string())])) as writer:
        writer.write_table(pa.table({"id": list(texts)}))
    return sink.getvalue()


def ids(address: str) -> list[Any]:
    with open_job(address) as source:
        found = [row.id for batch in source.batches([]) for row in batch]
        assert [row.id for batch in source.batches(None) for row in batch] == found
        return found


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("j.jsonl", LINES, ["a", "b"]),
        ("j.jsonl.gz", gzip.compress(LINES), ["a", "b"]),
        ("j.jsonl.zst", pa.compress(LINES, codec="zstd", asbytes=True), ["a", "b"]),
        ("c.csv", b"id,x\n007,1\n", ["007"]),
        ("c.tsv.gz", gzip.compress(b"id\tx\n007\t1\n"), ["007"]),
        ("p.parquet", parquet(pa.table({"id": [1, 2]})), [1, 2]),
        ("a.arrow", arrow("p", "q"), ["p", "q"]),
        ("without-ending", LINES, ["a", "b"]),
    ],
)
def test_every_format_is_read_from_an_address(
    store: MemoryFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    data: bytes,
    expected: list[Any],
) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    store.pipe(f"/bucket/{name}", data)
    (tmp_path / name).write_bytes(data)
    for address in (f"memory://bucket/{name}", f"file://{tmp_path}/{name}"):
        assert ids(address) == expected
    assert list(copies.iterdir()) == []


def test_folders_patterns_and_partitions_are_as_local_ones(store: MemoryFileSystem) -> None:
    for year in (2023, 2024):
        table = pa.table({"id": [f"{year}a", f"{year}b"], "v": [1, 2]})
        store.pipe(f"/h/year={year}/p.parquet", parquet(table))
    for name in ("_SUCCESS", "_temporary/x.parquet", "README.md"):
        store.pipe(f"/h/{name}", b"")
    expected = ["2023a", "2023b", "2024a", "2024b"]
    for address in ("h", "h/", "h/*/*.parquet", "h/year=*", "h/**/*.parquet"):
        with open_job(f"memory://{address}") as source:
            rows = [row for batch in source.batches(["year"]) for row in batch]
            assert [row.id for row in rows] == expected
            assert [row.values for row in rows] == [{"year": y} for y in (2023, 2023, 2024, 2024)]
            assert source.paths == ()
    store.pipe("/h/x.jsonl", LINES)
    with pytest.raises(InputError, match=r"memory://h mixes formats: JSON lines .* and Parquet"):
        open_job("memory://h")


def test_of_remote_parquet_only_the_columns_wanted_are_read(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = os.urandom(5 << 20).hex()
    table = pa.table({"id": ["a", "b"], "big": [big[:-9], big], "t": ["x", "y"]})
    store.pipe("/p.parquet", parquet(table, compression="none", use_dictionary=False))
    num_bytes = 0
    read = MemoryFile.read

    def counted(self: MemoryFile, size: int = -1) -> bytes:
        nonlocal num_bytes
        data = read(self, size)
        num_bytes += len(data)
        return data

    monkeypatch.setattr(MemoryFile, "read", counted)
    with open_job("memory://p.parquet") as source:
        assert [r.values for b in source.batches(["t"]) for r in b] == [{"t": "x"}, {"t": "y"}]
    assert num_bytes < 1 << 20 < 20 << 20 < store.size("/p.parquet")


def test_a_remote_file_that_changes_between_passes_is_refused(store: MemoryFileSystem) -> None:
    store.pipe("/p.parquet", parquet(pa.table({"id": [1, 2]})))
    with open_job("memory://p.parquet") as source:
        store.pipe("/p.parquet", parquet(pa.table({"id": [3, 4]})))  # of the same size
        with pytest.raises(InputError, match=r"memory://p\.parquet changed"):
            list(source.batches([]))
    store.pipe("/j.jsonl", LINES)
    with open_job("memory://j.jsonl") as source:
        store.rm("/j.jsonl")  # it was copied, so the run goes on
        assert [row.id for batch in source.batches([]) for row in batch] == ["a", "b"]


def test_a_connection_that_breaks_is_an_error_in_one_sentence(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pipe("/p.parquet", parquet(pa.table({"id": range(1000)})))
    store.pipe("/j.jsonl", LINES)

    class BrokenError(Exception):
        """Of some library, as botocore's are."""

    def broken(self: Any, size: int = -1) -> bytes:
        raise BrokenError("connection reset by peer\nTraceback ...")

    monkeypatch.setattr(MemoryFile, "read", broken)
    for name in ("p.parquet", "j.jsonl"):
        with pytest.raises(InputError) as caught:
            ids(f"memory://{name}")
        assert str(caught.value) == (
            f"memory://{name} cannot be read: BrokenError: connection reset by peer"
        )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "s3://bucket/x.parquet",
            "s3:// needs a package that is not installed: `pip install s3fs`",
        ),
        ("gs://bucket/*.jsonl", "`pip install gcsfs`"),
        ("https://example.org/x.jsonl", "`pip install aiohttp`"),
        ("simplecache::abfs://c/x.csv", "abfs:// needs .* `pip install adlfs`"),
        ("sftp://host/x.csv", "not installed: .*paramiko"),
        ("foo://x.csv", "foo://x.csv is no address that can be read: Protocol not known: foo"),
        ("memory://none.jsonl", "no file memory://none.jsonl; check the address"),
        ("memory://none/*.jsonl", "no file matches memory://none"),
        ("file:///none/x.jsonl", "no file /none/x.jsonl"),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_with_the_remedy(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("s3fs", "gcsfs", "adlfs", "aiohttp", "paramiko"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=words):
        open_job(address)


def test_data_sets_of_the_hub_are_read_where_they_are(tmp_path: Path) -> None:
    hub = HubStandIn()
    hub.commits.append("first")
    hub.files["me/set"] = {
        "README.md": b"# A set",
        "data/train-0.parquet": parquet(pa.table({"id": ["a"]})),
        "data/train-1.parquet": parquet(pa.table({"id": ["b"]})),
        "rows.jsonl": LINES,
    }
    names = ("data", "data/train-*.parquet", "rows.jsonl", "none.jsonl")
    code = (
        "from batchradix.jobs import open_job\n"
        f"for name in {names!r}:\n"
        "    try:\n"
        "        with open_job(f'hf://datasets/me/set/{name}') as source:\n"
        "            print([row.id for batch in source.batches([]) for row in batch])\n"
        "    except Exception as error:\n"
        "        print(error)\n"
    )
    environ = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
        )
    finally:
        hub.close()
    assert done.stdout.splitlines() == [
        "['a', 'b']",
        "['a', 'b']",
        "['a', 'b']",
        "there is no file hf://datasets/me/set/none.jsonl; check the address",
    ], done.stderr
