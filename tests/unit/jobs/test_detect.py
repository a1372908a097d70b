"""What `open_job` takes for what, and what it refuses."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix.errors import InputError
from batchradix.jobs import open_job
from batchradix.jobs.detect import Spool

LINES = b'\n{"id": "b1", "prompt": "x"}\n   \n{"id": "b2", "prompt": "y"}\n\n\n{"id": "b3"}'


class PipedInput:
    """Standard input whose bytes can be read once and not sought."""

    closed = False

    def __init__(self, data: bytes, *, terminal: bool = False) -> None:
        self._terminal = terminal
        read_end, write_end = os.pipe()
        threading.Thread(target=self._fill, args=(write_end, data)).start()
        self.buffer = os.fdopen(read_end, "rb")

    @staticmethod
    def _fill(write_end: int, data: bytes) -> None:
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(data)

    def isatty(self) -> bool:
        return self._terminal


def ids(source: Any) -> list[Any]:
    return [row.id for batch in source.batches([]) for row in batch]


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": ["p"], "a": [1]}), sink)
    return sink.getvalue()


def arrow_bytes(*, stream: bool) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"id": ["p"], "a": [1]})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (LINES, ["b1", "b2", "b3"]),
        (b"", []),
        (b"not json", ["0"]),
        (parquet_bytes(), ["p"]),
        (arrow_bytes(stream=False), ["p"]),
        (arrow_bytes(stream=True), ["p"]),
    ],
)
def test_standard_input_can_be_read_any_number_of_times_and_leaves_nothing_behind(
    data: bytes, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", (piped := PipedInput(data)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with piped.buffer, open_job("-") as source:
        assert source.name == "standard input"
        assert ids(source) == ids(source) == expected
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refused_pipe_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for data in (b"PAR1 and then nothing", b"\xff\xfe{\x00}\x00"):
        monkeypatch.setattr(sys, "stdin", (piped := PipedInput(data)))
        with piped.buffer, pytest.raises(InputError, match="standard input"):
            open_job("-")
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_or_a_closed_standard_input_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", (terminal := PipedInput(b"", terminal=True)))
    with terminal.buffer, pytest.raises(InputError, match="terminal"):
        open_job("-")
    for nothing in (None, io.StringIO("{}")):
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(InputError, match="closed"):
            open_job("-")


def test_a_named_pipe_is_read_once_and_kept(tmp_path: Path) -> None:
    fifo = tmp_path / "rows.jsonl"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(LINES,))
    writer.start()
    with open_job(fifo) as source:
        writer.join()
        assert ids(source) == ids(source) == ["b1", "b2", "b3"]


def test_a_full_temporary_folder_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "wb")  # noqa: SIM115
    monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda **_: full)
    with pytest.raises(InputError, match=r"standard input is copied .* No space left .* TMPDIR"):
        Spool([b"x"], "standard input")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.parquet", b'{"id": 1}\n', "a.parquet is not Parquet .* looks like JSON lines"),
        ("a.parquet", b"", "a.parquet is empty"),
        ("a.parquet", b"hello there", "a.parquet is not Parquet"),
        ("a.arrow", parquet_bytes(), "a.arrow is not Arrow IPC .* looks like Parquet"),
        ("a.feather", b"FEA1....", "Feather version 1"),
        ("a.jsonl", parquet_bytes(), "a.jsonl is not JSON lines .* looks like Parquet"),
        ("a.jsonl", arrow_bytes(stream=True), "looks like Arrow"),
        ("a.jsonl", '{"a":1}'.encode("utf-16"), "UTF-16"),
        ("a.jsonl", b'[\n {"a": 1}\n]\n', "spread over many lines"),
        ("a.jsonl", b'{\n "a": 1\n}\n', "spread over many lines"),
        ("a.json", b'[{"a": 1}]', "JSON array.*jq"),
        ("a.jsonl", b'[{"a": 1}, {"a": 2}]', "is one JSON array; .*jq"),
        ("a.jsonl", b' [ \n {"a": 1}]', "is JSON spread"),
        ("a.csv", parquet_bytes(), "a.csv is not CSV"),
        ("a.jsonl.gz", b"\x1f\x8b\x08garbage", "a.jsonl.gz is damaged"),
        ("a.txt", b"some text", "no known ending .*Parquet"),
        ("a", b"", "no known ending and it is empty"),
        ("a.jsonl.bz2", bz2.compress(b"{}"), "looks like bzip2; known are .* also .gz and .zst"),
        ("a.jsonl.xz", lzma.compress(b"{}"), "looks like xz"),
        ("a.xlsx", b"PK\x03\x04....", "spreadsheet"),
        ("a.parquet", b"PARE....PARE", "encrypted Parquet"),
        ("a.jsonl", '{"a":1}'.encode("utf-16-le"), "UTF-16"),
        ("a.jsonl", '{"a":1}'.encode("utf-32"), "UTF-32"),
        ("a.parquet.gz", gzip.compress(parquet_bytes()), "compressed as a whole; decompress"),
        ("a", gzip.compress(arrow_bytes(stream=True)), "is Arrow IPC, compressed as a whole"),
        ("a.parquet", b"PAR1" + b"\0" * 50, "a.parquet is damaged"),
    ],
)
def test_what_is_no_job_is_refused_by_name_and_kind(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError, match=words):
        open_job(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("jobs", parquet_bytes()),
        ("jobs.bin", arrow_bytes(stream=True)),
        ("jobs.data", arrow_bytes(stream=False)),
        ("jobs.json", b'\xef\xbb\xbf\n {"id": "p"}'),
        ("JOBS.PARQUET", parquet_bytes()),
        ("jobs.v2.jsonl", b'{"id": "p"}'),
        ("jobs.tsv", b"id\tprompt\np\tx\n"),
        ("JOBS.TSV", b"id\tprompt\np\tx\n"),
    ],
)
def test_the_ending_or_else_the_content_says_the_format(
    tmp_path: Path, name: str, data: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    for spelling in (path, str(path)):
        with open_job(spelling) as source:
            assert ids(source) == ["p"]
            assert source.name == str(path)


def test_an_ordinary_table_with_a_custom_id_and_a_body_is_no_batch_file(tmp_path: Path) -> None:
    path = tmp_path / "mails.jsonl"
    path.write_bytes(b'{"custom_id": "m1", "body": "Dear all"}')
    with open_job(path, id_column="custom_id") as source:
        assert ids(source) == ["m1"]


def test_missing_files_and_empty_folders_are_refused(tmp_path: Path) -> None:
    for job, words in (
        (tmp_path / "none.jsonl", "no file .*none.jsonl"),
        (tmp_path / "none" / "x.parquet", "no file"),
        (tmp_path / "*.jsonl", "no file matches"),
        (tmp_path, "holds no file of rows"),
        ("~nosuchuser/x.jsonl", "no such user"),
        ("a\0b", "no path"),
        ("", "no path"),
        ("x" * 5000, "cannot be read"),
    ):
        with pytest.raises(InputError, match=words):
            open_job(job)


def test_a_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}")
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(InputError, match=r"a\.jsonl may not be read"):
        open_job(path)


def test_a_pattern_takes_files_by_name_and_of_one_format_only(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"id": 2}')
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 1}\n')
    with open_job(tmp_path / "*.jsonl") as source:
        assert ids(source) == ["1", "2"]
    (tmp_path / "c.parquet").write_bytes(parquet_bytes())
    with pytest.raises(InputError, match="mixes formats"):
        open_job(tmp_path / "*")
    (tmp_path / "odd[1].jsonl").write_bytes(b'{"id": 3}')
    with open_job(tmp_path / "odd[1].jsonl") as source:
        assert ids(source) == ["3"]


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(InputError, match="limit"):
        open_job([], limit=-1)


def test_importing_the_room_loads_no_heavy_library() -> None:
    code = (
        "import sys, batchradix.jobs; "
        "print([m for m in ('pyarrow', 'polars', 'datasets', 'pandas', 'torch') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
