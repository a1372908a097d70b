"""`open_job`: what kind of input this is, decided by its name and checked against its bytes."""

from __future__ import annotations

import glob
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchradix.errors import InputError
from batchradix.jobs.base import JobSource
from batchradix.jobs.files import GZIP_MAGIC, ZSTD_MAGIC, InputFile, Spool, pieces_of, readable

if TYPE_CHECKING:
    from batchradix.jobs.records import Record

_FORMAT_OF_SUFFIX = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_COMPRESSED = (".gz", ".zst", ".zstd")
_DESCRIPTION = {"parquet": "Parquet", "jsonl": "JSON lines", "csv": "CSV", "arrow": "Arrow IPC"}
_FORMATS = "Parquet (.parquet), JSON lines (.jsonl, .ndjson, also .gz and .zst), CSV (.csv), Arrow"
_MAY_BE_TEXT = ("jsonl", "array", "empty", "")
_NUM_RECORDS_LOOKED_AT = 16


def open_job(
    input: Any,
    *,
    id_column: str | None = None,
    limit: int | None = None,
) -> JobSource:
    """Opens an input as a source of rows; reads no more of it than its metadata.

    ``input`` is a path, ``-`` for standard input (copied to a temporary file until the source
    is closed), a folder of Parquet files, a pattern such as ``part-*.jsonl``, or an object in
    memory (see `open_memory`). ``limit`` takes the first rows only, as if the input ended
    there. Raises `InputError` when the input is missing, unreadable, damaged, of an unknown
    format or of another format than its name says, or has no column ``id_column``.
    """
    if limit is not None and limit < 0:
        raise InputError(f"limit must be 0 or more, not {limit}")
    if not isinstance(input, (str, os.PathLike)):
        from batchradix.jobs.memory import open_memory, open_requests
        from batchradix.jobs.openai_batch import is_request

        is_list = isinstance(input, (list, tuple))
        if is_list and any(map(is_request, input[:_NUM_RECORDS_LOOKED_AT])):
            return open_requests(input, id_column=id_column, limit=limit)
        return open_memory(input, id_column=id_column, limit=limit)
    text = os.fspath(input)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    settings: dict[str, Any] = {"id_column": id_column, "limit": limit}
    if text == "-":
        return _open_standard_input(settings)
    if "://" in text:
        raise InputError(f"{text} is an address, not a local path; download it first")
    if "\0" in text:
        raise InputError(f"{text!r} is no path")
    with readable(text):
        path = Path(text).expanduser()
        mode = path.stat().st_mode if path.exists() else None
    if mode is None and glob.has_magic(text):
        return _open_files(text, _matches(str(path)), settings)
    if mode is None or stat.S_ISREG(mode):
        return _open_files(text, [path], settings)
    if stat.S_ISDIR(mode):
        return _open_files(text, _parquet_files_of(path), settings)
    with readable(text), open(path, "rb") as pipe:
        spool = Spool(pieces_of(pipe), text)
    return _open_spool(spool, settings)


def _matches(pattern: str) -> list[Path]:
    found = [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
    files = [p for p in found if p.is_file()]
    if not files:
        raise InputError(f"no file matches {pattern}")
    return files


def _open_standard_input(settings: dict[str, Any]) -> JobSource:
    name = "standard input"
    if sys.stdin is None or sys.stdin.closed or not hasattr(sys.stdin, "buffer"):
        raise InputError("standard input is closed; pipe rows into it or name a file")
    if sys.stdin.isatty():
        raise InputError("standard input is a terminal; pipe rows into it or name a file")
    return _open_spool(Spool(pieces_of(sys.stdin.buffer), name), settings)


def _open_spool(spool: Spool, settings: dict[str, Any]) -> JobSource:
    """JSON lines, unless the first bytes are those of Parquet or Arrow."""
    try:
        content = _sniff(spool.file)
        if content not in ("parquet", "arrow"):
            if content not in _MAY_BE_TEXT:
                raise InputError(f"{spool.file.name} is not JSON lines: it looks like {content}")
            content = "jsonl"
        source = _open_format(content, spool.file.name, [spool.file], settings)
    except BaseException:
        spool.close()
        raise
    source.hold(spool)
    return source


def _parquet_files_of(folder: Path) -> list[Path]:
    def visible(path: Path) -> bool:
        return path.is_file() and not path.name.startswith((".", "_"))

    try:
        files = sorted(p for p in folder.iterdir() if p.suffix == ".parquet" and visible(p))
        if not files and any(map(visible, folder.rglob("*.parquet"))):
            raise InputError(
                f"the folder {folder} has Parquet files in folders below it only; "
                f"name them with a pattern such as '{folder}/**/*.parquet'"
            )
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be read: {error.strerror}") from None
    if not files:
        raise InputError(
            f"the folder {folder} holds no Parquet file (*.parquet); "
            f"files of another format take a pattern such as '{folder}/*.jsonl'"
        )
    return files


def _open_files(name: str, paths: Sequence[Path], settings: dict[str, Any]) -> JobSource:
    files = [InputFile.at(path) for path in paths]
    formats = {_format_of(file): file for file in files}
    if len(formats) > 1:
        kinds = " and ".join(f"{_DESCRIPTION[k]} ({f.name})" for k, f in formats.items())
        raise InputError(f"{name} mixes formats: {kinds}; give files of one format")
    source = _open_format(next(iter(formats)), name, files, settings)
    source.paths = tuple(paths)
    return source


def _open_format(
    format_: str, name: str, files: list[InputFile], settings: dict[str, Any]
) -> JobSource:
    if format_ == "parquet":
        from batchradix.jobs.parquet import ParquetSource

        return ParquetSource(name, files, **settings)
    if format_ == "arrow":
        from batchradix.jobs.arrow import ArrowFileSource

        if len(files) > 1:
            raise InputError(f"{name} is more than one Arrow file; give them one by one")
        return ArrowFileSource(name, files[0], **settings)
    if format_ == "csv":
        from batchradix.jobs.csv import CsvSource

        return CsvSource(name, files, **settings)
    return _open_json_lines(name, files, settings)


def _open_json_lines(name: str, files: list[InputFile], settings: dict[str, Any]) -> JobSource:
    from batchradix.jobs.jsonl import JsonlSource, read_jsonl

    are_requests = {_holds_requests(file): file.name for file in files}
    if len(are_requests) > 1:
        raise InputError(
            f"{name} mixes OpenAI batch files ({are_requests[True]}) and files of rows "
            f"({are_requests[False]}); give files of one kind"
        )
    if False in are_requests:
        return JsonlSource(name, files, **settings)
    from batchradix.jobs.openai_batch import OpenAIBatchSource

    def records() -> Iterator[tuple[str, Record]]:
        return ((file.name, record) for file in files for record in read_jsonl(file))

    return OpenAIBatchSource(name, records, **settings)


def _format_of(file: InputFile) -> str:
    """The format by the name's ending, or by content where that says nothing."""
    suffixes = [s.lower() for s in file.path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    named = _FORMAT_OF_SUFFIX.get(suffixes[-1]) if suffixes else None
    content = _sniff(file)
    if named is None:
        if content in _DESCRIPTION:
            return content
        what = {"empty": "it is empty", "array": "it looks like a JSON array, not JSON lines"}
        seen = what.get(content, f"it looks like {content}" if content else "no known content")
        raise InputError(f"{file.name} has no known ending and {seen}; known are {_FORMATS}")
    if named in ("parquet", "arrow") and content != named:
        raise InputError(_says_otherwise(file, named, content))
    if named in ("jsonl", "csv") and content not in _MAY_BE_TEXT:
        raise InputError(_says_otherwise(file, named, content))
    return named


def _says_otherwise(file: InputFile, named: str, content: str) -> str:
    if content == "empty":
        return f"{file.name} is empty (0 bytes) and so is not {_DESCRIPTION[named]}"
    seen = _DESCRIPTION.get(content, content)
    if content == "array":
        seen = "JSON"
    looks = f"it looks like {seen}" if seen else "its first bytes say otherwise"
    return (
        f"{file.name} is not {_DESCRIPTION[named]} although it is named so: {looks}; "
        f"rename it after what it holds, or make it again"
    )


def _sniff(file: InputFile) -> str:
    """``parquet``, ``arrow``, ``jsonl``, ``array``, ``empty``, words for what is refused, or ""."""
    head = file.head()
    if head[:2] == GZIP_MAGIC or head[:4] == ZSTD_MAGIC:
        head = file.head(decompress=True)
    if not head:
        return "empty"
    for magic, kind in (
        (b"PAR1", "parquet"),
        (b"ARROW1", "arrow"),
        (b"\xff\xff\xff\xff", "arrow"),
        (b"PARE", "encrypted Parquet"),
        (b"FEA1", "Feather version 1"),
        (b"\xff\xfe", "text in UTF-16"),
        (b"\xfe\xff", "text in UTF-16"),
        (b"PK\x03\x04", "a zip archive or a spreadsheet"),
        (b"SQLite format 3", "an SQLite database"),
    ):
        if head.startswith(magic):
            return kind
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return {b"{": "jsonl", b"[": "array"}.get(text[:1], "")


def _holds_requests(file: InputFile) -> bool:
    """Whether these are lines of the OpenAI Batch API; refuses JSON that is not one object a
    line."""
    from batchradix.jobs.jsonl import read_jsonl
    from batchradix.jobs.openai_batch import is_request

    head = file.head(decompress=True).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.split(b"\n", 1)[0].strip() in (b"[", b"{"):
        raise InputError(
            f"{file.name} is JSON spread over many lines; JSON lines have one object on each "
            f"line (`jq -c '.[]'` turns an array into them)"
        )
    records = islice(read_jsonl(file), _NUM_RECORDS_LOOKED_AT)
    return any(is_request(record.fields) for record in records)
