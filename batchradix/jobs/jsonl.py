"""JSON lines: one JSON object a line, UTF-8, read as a stream (https://jsonlines.org)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from batchradix.errors import RowError, RowErrorCode
from batchradix.jobs.files import InputFile, readable
from batchradix.jobs.records import Record, RecordSource, in_partition

_BOM = b"\xef\xbb\xbf"
MAX_DEPTH = 200
"""Objects and lists within one another; a deeper line is an error row."""


class JsonlSource(RecordSource):
    """Files of JSON lines, one after the other; see `read_jsonl` for what a line may be."""

    def __init__(
        self,
        name: str,
        files: Sequence[InputFile],
        *,
        id_column: str | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(name, id_column=id_column, limit=limit)
        self._files = tuple(files)

    def _records(self) -> Iterator[Record]:
        for file in self._files:
            yield from in_partition(read_jsonl(file), file.partition)


def read_jsonl(file: InputFile) -> Iterator[Record]:
    """The records of one file, gzip and Zstandard decompressed; any number of passes.

    A line ends at a line feed only. A byte order mark is dropped at the start of the file
    alone; lines of white space are skipped and counted. A line that is no JSON object in UTF-8
    yields a `RowError`, and reading goes on. Integers are exact whatever their size, other
    numbers are floats (beyond float64 they are infinite), ``NaN`` and ``Infinity`` are read,
    and of equal keys the last one counts. Raises `InputError` when the file is damaged, with
    the last line before that.
    """
    number = 0
    with readable(file.name, lambda: f" after line {number}"), file.open_stream() as stream:
        for number, raw in enumerate(stream, 1):
            if number == 1 and raw.startswith(_BOM):
                raw = raw[len(_BOM) :]
            if raw.isspace() or not raw:
                continue
            yield Record(number, parse_line(raw, f"{file.name} line {number}"), len(raw))


def parse_line(raw: bytes, where: str) -> dict[str, Any] | RowError:
    """One line as an object, or why it is none; ``where`` begins the message."""
    try:
        value = json.loads(raw.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        return _bad_line(where, f"is not UTF-8: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        if raw.startswith(_BOM):
            return _bad_line(where, "is not JSON: it begins with a byte order mark")
        return _bad_line(where, f"is not JSON: {error.msg} (column {error.colno})")
    except ValueError:  # Python's guard against integers that take minutes to convert
        return _bad_line(where, "holds an integer of thousands of digits")
    except RecursionError:
        return _bad_line(where, "is nested too deep")
    if not isinstance(value, dict):
        return _bad_line(where, f"is {_json_kind(value)}, not an object with named fields")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        return _bad_line(where, f"is nested more than {MAX_DEPTH} levels deep")
    return value


def _bad_line(where: str, problem: str) -> RowError:
    return RowError(RowErrorCode.BAD_LINE, f"{where} {problem}")


def _json_kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a string"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a number"


def _depth(value: dict[str, Any]) -> int:
    """How many objects and lists lie within one another, level by level without recursion."""
    depth = 0
    level: list[dict[str, Any] | list[Any]] = [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    return depth
