"""Untyped input: records with names and Python values, whose types are learnt in one pass."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from batchradix.errors import RowError, RowErrorCode
from batchradix.jobs.base import BATCH_BYTES, DEFAULT_BATCH_ROWS, NO_ID_COLUMN, JobSource
from batchradix.jobs.files import Partition
from batchradix.jobs.id_count import MAX_COUNTED_IDS, IdCount
from batchradix.schema.arrow_types import JSON_METADATA
from batchradix.types import Row

# What a column has held so far, as bits.
_BOOL, _SMALL_INT, _INT64, _FLOAT, _STRING, _OTHER = 1, 2, 4, 8, 16, 32
_EXACT_IN_FLOAT64 = 2**53


class Record(NamedTuple):
    """One record: its physical line (from 1) if any, its fields or why it has none."""

    line: int | None
    fields: dict[str, Any] | RowError
    num_bytes: int


def in_partition(records: Iterable[Record], partition: Partition) -> Iterator[Record]:
    """The records of a file with what its folders say behind their own fields, which go first."""
    for record in records:
        fields = record.fields
        if partition and not isinstance(fields, RowError):
            fields = fields | {k: v for k, v in partition.items() if k not in fields}
            record = record._replace(fields=fields)
        yield record


class RecordSource(JobSource):
    """A source over `Record`s. Ids are text, digits intact; a null or missing id is null.

    A column passed through is boolean, int64, float64 (also for integers and floats together
    where every integer is exact) or string when all its values are; what is mixed, nested or
    beyond int64 becomes a string that holds JSON text.
    """

    typed = False

    def __init__(self, name: str, *, id_column: str | None, limit: int | None) -> None:
        super().__init__(name, id_column=id_column, limit=limit)
        self._kinds: dict[str, int] | None = None
        self._num_rows = 0
        self._num_duplicate_ids: int | None = 0

    @abstractmethod
    def _records(self) -> Iterator[Record]:
        """All records from the beginning, without regard to the limit."""

    def _place(self, index: int, line: int | None) -> str:
        return f"row {index}" if line is None else f"row {index} (line {line})"

    @property
    def columns(self) -> tuple[str, ...] | None:
        return None if self._kinds is None else tuple(self._kinds)

    @property
    def num_rows(self) -> int | None:
        return None if self._kinds is None else self._num_rows

    @property
    def id_type(self) -> pa.DataType:
        return pa.string()

    @property
    def id_column(self) -> str | None:
        self.scan()
        name = self._named_id_column
        return name if name in self._known_columns() else None

    @property
    def _named_id_column(self) -> str | None:
        """The column that ids come from if it is there."""
        if self._wanted_id_column == NO_ID_COLUMN:
            return None
        return self._wanted_id_column or "id"

    @property
    def num_duplicate_ids(self) -> int | None:
        self.scan()
        return self._num_duplicate_ids

    def scan(self) -> None:
        if self._kinds is not None:
            return
        kinds: dict[str, int] = {}
        id_column = self._named_id_column
        ids = IdCount(MAX_COUNTED_IDS)
        num_rows = num_readable = 0
        for record in islice(self._records(), self._limit):
            num_rows += 1
            if isinstance(record.fields, RowError):
                continue
            num_readable += 1
            kinds_of_columns(record.fields, kinds)
            id_value = None if id_column is None else record.fields.get(id_column)
            if id_value is not None:
                ids.add(_id_text(id_value))
        self._kinds = kinds
        self._num_rows = num_rows
        self._num_duplicate_ids = ids.duplicates()
        if self._wanted_id_column and num_readable and id_column not in kinds:
            assert id_column is not None
            missing = self._missing_column(id_column, "take ids from")
            self._kinds = None
            raise missing

    def batches(
        self, columns: Collection[str] | None, batch_rows: int = DEFAULT_BATCH_ROWS
    ) -> Iterator[list[Row]]:
        id_column = self.id_column
        wanted = None if columns is None else frozenset(columns)
        rows: list[Row] = []
        num_bytes = 0
        for index, record in enumerate(islice(self._records(), self._limit)):
            rows.append(self._row(index, record, id_column, wanted))
            num_bytes += record.num_bytes
            if len(rows) >= batch_rows or num_bytes >= BATCH_BYTES:
                yield rows
                rows, num_bytes = [], 0
        if rows:
            yield rows

    def _row(
        self, index: int, record: Record, id_column: str | None, wanted: frozenset[str] | None
    ) -> Row:
        line, fields, _ = record
        if isinstance(fields, RowError):
            row_id = None if id_column is not None else str(index)
            return Row(index=index, line=line, id=row_id, error=fields)
        row_id, error = str(index), None
        if id_column is not None:
            value = fields.get(id_column)
            row_id = None if value is None else _id_text(value)
            problem = None if value is None else _id_problem(value)
            if problem is not None:
                where = self._place(index, line)
                message = f"{where}: the id column {id_column!r} {problem}"
                error = RowError(RowErrorCode.BAD_VALUE, message)
                row_id = None
        values = fields
        if wanted is not None:
            values = {c: v for c, v in fields.items() if c in wanted}
        return Row(index=index, line=line, id=row_id, values=values, error=error)

    def _keep_field(self, column: str) -> pa.Field:
        assert self._kinds is not None
        type_, convert = _keep_type(self._kinds[column])
        return pa.field(column, type_, metadata=JSON_METADATA if convert is json_text else None)

    def _keep_batches(
        self, columns: list[str], schema: pa.Schema, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        assert self._kinds is not None
        convert = [_keep_type(self._kinds[c])[1] for c in columns]
        for rows in self.input_batches(columns, batch_rows):
            # A row with an unusable id has values all the same, and they are passed through.
            arrays = [
                pa.array(
                    [None if (v := r.values.get(c)) is None else f(v) for r in rows], field.type
                )
                for c, f, field in zip(columns, convert, schema, strict=True)
            ]
            if arrays:
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            else:
                yield empty_batch(len(rows))


def empty_batch(num_rows: int) -> pa.RecordBatch:
    """A record batch of so many rows and no column."""
    return pa.RecordBatch.from_arrays([pa.nulls(num_rows)], names=["none"]).select([])


def kinds_of_columns(fields: Mapping[str, Any], kinds: dict[str, int]) -> None:
    """Adds to ``kinds`` what the columns of a record hold, as bits."""
    for column, value in fields.items():
        kinds[column] = kinds.get(column, 0) | _kind(value)


def _kind(value: Any) -> int:
    if value is None:
        return 0
    kind = type(value)
    if kind is str:
        return _STRING
    if kind is bool:
        return _BOOL
    if kind is int:
        if -_EXACT_IN_FLOAT64 <= value <= _EXACT_IN_FLOAT64:
            return _SMALL_INT
        return _INT64 if -(2**63) <= value < 2**63 else _OTHER
    return _FLOAT if kind is float else _OTHER


def _keep_type(kinds: int) -> tuple[pa.DataType, Any]:
    """Arrow type of a column that held these kinds, and what turns a value into it."""
    if kinds == _BOOL:
        return pa.bool_(), bool
    if kinds and not kinds & ~(_SMALL_INT | _INT64):
        return pa.int64(), int
    if kinds and not kinds & ~(_SMALL_INT | _FLOAT):
        return pa.float64(), float
    if not kinds & ~_STRING:
        return pa.string(), clean_text
    return pa.string(), json_text


def clean_text(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def json_text(value: Any) -> str:
    """A value as compact JSON; lone surrogates stay as escapes, NaN and infinity as names."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), default=str)
    return text


def _id_text(value: Any) -> str:
    if isinstance(value, (bool, float, dict, list, tuple)):
        return json_text(value)
    return str(value)


def _id_problem(value: Any) -> str | None:
    if isinstance(value, (dict, list, tuple)):
        return f"holds a {type(value).__name__}; an id must be text or a number"
    if isinstance(value, str) and clean_text(value) is not value:
        return f"holds half a character (a lone surrogate): {value!r}"
    return None
