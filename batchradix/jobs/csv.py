"""CSV and TSV files: every value is text, an empty cell is null."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from batchradix.errors import InputError, RowError, RowErrorCode
from batchradix.jobs.files import InputFile, readable
from batchradix.jobs.records import Record, RecordSource, in_partition
from batchradix.jobs.row_settings import SETTING_COLUMNS

_OPEN_QUOTE = "unexpected end of data"  # as the csv module says it
_NUMBER_COLUMNS = frozenset(SETTING_COLUMNS) - {"stop"}


class CsvSource(RecordSource):
    """Files with a header line each; separated by commas, or by tabs where named ``.tsv``.

    Values are text as written (no number is guessed), except in columns that set an option of
    their row (``max_tokens`` and so on), where a number is read as one. A record with more or
    fewer cells than the header, or with bytes that are not UTF-8, is a `RowError`; a quote that
    nothing closes, which would swallow all rows behind it, is refused.
    """

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
            yield from in_partition(_read_csv(file), file.partition)


def _read_csv(file: InputFile) -> Iterator[Record]:
    tabs = ".tsv" in map(str.lower, file.path.suffixes)
    line = 0
    with readable(file.name, lambda: f" after line {line}"), file.open_stream() as stream:
        # What is not UTF-8 comes through as surrogates, and is then found in its own record.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter="\t" if tabs else ",", strict=True)
        header = _next_cells(reader, f"{file.name} line 1")
        if header is None:
            return
        if isinstance(header, RowError):
            raise InputError(f"the header cannot be read: {header.message}")
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise InputError(f"the header of {file.name} names the column {twice!r} twice")
        while True:
            line = reader.line_num + 1
            where = f"{file.name} line {line}"
            cells = _next_cells(reader, where)
            if cells is None:
                return
            if isinstance(cells, RowError):
                yield Record(line, cells, 0)
            elif cells:
                yield Record(line, _fields(cells, header, where), sum(map(len, cells)))


def _next_cells(reader: Any, where: str) -> list[str] | RowError | None:
    """The cells of the next record ([] for a blank line), why it has none, or None at the end."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        cells: list[str] = next(reader)
    except StopIteration:
        return None
    except csv.Error as error:
        if str(error) == _OPEN_QUOTE:
            raise InputError(
                f"{where}: a quote is opened in the record that begins here and never closed; "
                f'close it, or write a quote within quotes twice ("")'
            ) from None
        return RowError(RowErrorCode.BAD_LINE, f"{where} is not CSV: {error}")
    finally:
        csv.field_size_limit(limit)
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return RowError(RowErrorCode.BAD_LINE, f"{where} is not UTF-8")
    return cells


def _fields(cells: list[str], header: list[str], where: str) -> dict[str, Any] | RowError:
    if len(cells) != len(header):
        problem = f"{where} has {len(cells)} cells, but the header has {len(header)}"
        return RowError(RowErrorCode.BAD_LINE, problem)
    return {
        name: (_number(cell) if name in _NUMBER_COLUMNS else cell) if cell else None
        for name, cell in zip(header, cells, strict=True)
    }


def _number(cell: str) -> str | int | float:
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(cell)
    return cell
