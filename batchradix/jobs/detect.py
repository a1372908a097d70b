"""`open_job`: what kind of input this is, decided by its name and checked against its bytes."""

from __future__ import annotations

import glob
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchradix.errors import InputError
from batchradix.jobs.base import JobSource
from batchradix.jobs.files import (
    GZIP_MAGIC,
    InputFile,
    Spool,
    is_zstandard,
    pieces_of,
    readable,
)
from batchradix.jobs.listing import folder_files, named_format, pattern_files, remote_files
from batchradix.jobs.remote import RemoteFile

if TYPE_CHECKING:
    from batchradix.jobs.records import Record

_DESCRIPTION = {"parquet": "Parquet", "jsonl": "JSON lines", "csv": "CSV", "arrow": "Arrow IPC"}
_FORMATS = "Parquet (.parquet), JSON lines (.jsonl, .ndjson, also .gz and .zst), CSV (.csv), Arrow"
_JQ = "`jq -c '.[]'` turns an array into them"
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
    is closed), a folder, a pattern such as ``part-*.jsonl``, an address such as
    ``s3://bucket/folder`` (all but Parquet is copied likewise), or an object in memory (see
    `open_memory`). ``limit`` takes the first rows only, as if the input ended there. Raises
    `InputError` when the input is missing, unreadable, damaged, of an unknown format or of
    another format than its name says, or has no column ``id_column``.
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
    if not text or "\0" in text:
        raise InputError(f"the input {text!r} is no path; name a file, a folder or a pattern")
    place = remote_files(text) if "://" in text else text
    if not isinstance(place, str):
        return _open_files(text, place, settings)
    with readable(text):
        try:
            path = Path(place).expanduser()
        except RuntimeError:
            raise InputError(f"{text}: there is no such user; check the path") from None
        mode = path.stat().st_mode if path.exists() else None
    if mode is None and glob.has_magic(place):
        return _open_files(text, pattern_files(str(path)), settings)
    if mode is None or stat.S_ISREG(mode):
        return _open_files(text, [InputFile.at(path)], settings)
    if stat.S_ISDIR(mode):
        source = _open_files(text, folder_files(path), settings)
        source.folder = path
        return source
    with readable(text), open(path, "rb") as pipe:
        spool = Spool(pieces_of(pipe), text)
    return _open_spool(spool, settings)


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


def _open_files(name: str, files: list[InputFile], settings: dict[str, Any]) -> JobSource:
    formats: dict[str, InputFile] = {}
    for file in files:
        formats.setdefault(_format_of(file), file)
    if len(formats) > 1:
        kinds = " and ".join(f"{_DESCRIPTION[k]} ({f.name})" for k, f in formats.items())
        raise InputError(
            f"{name} mixes formats: {kinds}; give files of one format, with a pattern such as "
            f"'*{next(iter(formats.values())).path.suffix}'"
        )
    (format_,) = formats
    paths = tuple(Path(file.path) for file in files if not isinstance(file, RemoteFile))
    with ExitStack() as stack:
        if format_ != "parquet":  # of which chosen columns are read where it is
            files = [_at_hand(file, stack) for file in files]
        source = _open_format(format_, name, files, settings)
        source.hold(stack.pop_all())
    source.paths = paths
    return source


def _at_hand(file: InputFile, stack: ExitStack) -> InputFile:
    """The file, or a temporary copy of a remote one: it is read several times, and a connection
    that breaks shall not stop a run in the middle."""
    if not isinstance(file, RemoteFile):
        return file
    with file.open() as stream:
        spool = Spool(pieces_of(stream), file.name, "".join(file.path.suffixes))
    stack.callback(spool.close)
    return replace(spool.file, partition=file.partition)


def _open_format(
    format_: str, name: str, files: list[InputFile], settings: dict[str, Any]
) -> JobSource:
    if format_ == "parquet":
        from batchradix.jobs.parquet import ParquetSource

        return ParquetSource(name, files, **settings)
    if format_ == "arrow":
        from batchradix.jobs.arrow import ArrowFileSource

        return ArrowFileSource(name, files, **settings)
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
    named = named_format(file.path)
    content = _sniff(file)
    if named is None:
        if content in _DESCRIPTION:
            return content
        what = {
            "empty": "it is empty",
            "array": f"it looks like a JSON array, not JSON lines ({_JQ})",
        }
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
    is_compressed = head[:2] == GZIP_MAGIC or is_zstandard(head)
    if is_compressed:
        head = file.head(decompress=True)
    if not head:
        return "empty"
    for magic, kind in (
        (b"PAR1", "parquet"),
        (b"ARROW1", "arrow"),
        (b"\xff\xff\xff\xff", "arrow"),
        (b"PARE", "encrypted Parquet"),
        (b"FEA1", "Feather version 1"),
        (b"\xff\xfe\0\0", "text in UTF-32"),
        (b"\xff\xfe", "text in UTF-16"),
        (b"{\0", "text in UTF-16"),
        (b"\0{", "text in UTF-16"),
        (b"\xfe\xff", "text in UTF-16"),
        (b"PK\x03\x04", "a zip archive or a spreadsheet"),
        (b"SQLite format 3", "an SQLite database"),
        (b"BZh91AY&SY", "bzip2"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x04\x22\x4d\x18", "LZ4"),
    ):
        if head.startswith(magic):
            if is_compressed and kind in ("parquet", "arrow"):
                raise InputError(
                    f"{file.name} is {_DESCRIPTION[kind]}, compressed as a whole; decompress it "
                    f"first (`gunzip`, `zstd -d`)"
                )
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
            f"{file.name} is JSON spread over many lines; JSON lines have one object on each line "
            f"({_JQ})"
        )
    if re.match(rb"\[\s*\{", head):
        raise InputError(
            f"{file.name} is one JSON array; JSON lines have one object on each line ({_JQ})"
        )
    records = islice(read_jsonl(file), _NUM_RECORDS_LOOKED_AT)
    return any(is_request(record.fields) for record in records)
