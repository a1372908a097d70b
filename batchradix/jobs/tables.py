"""Typed input: anything that can be read as Arrow record batches of chosen columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa

from batchradix.errors import InputError, RowError, RowErrorCode
from batchradix.jobs.arrow_values import (
    Unreadable,
    plain_array,
    plain_type,
    to_python,
    with_valid_text,
)
from batchradix.jobs.base import BATCH_BYTES, DEFAULT_BATCH_ROWS, NO_ID_COLUMN, JobSource
from batchradix.jobs.files import first_line
from batchradix.jobs.id_count import MAX_COUNTED_IDS, IdCount
from batchradix.jobs.records import empty_batch
from batchradix.types import Row


class TableSource(JobSource):
    """A source over record batches. Values and ids keep their types; dictionaries are decoded.

    Ids are integers, floats, text, booleans, decimals, dates or timestamps; other times and
    UUIDs become text, and nested or binary id columns are refused. Kept columns have the
    source's types without dictionary, run-length and view encodings.
    """

    typed = True

    def __init__(
        self,
        name: str,
        schema: pa.Schema,
        num_rows: int,
        *,
        id_column: str | None,
        limit: int | None,
    ) -> None:
        super().__init__(name, id_column=id_column, limit=limit)
        if len(set(schema.names)) < len(schema.names):
            twice = next(c for c in schema.names if schema.names.count(c) > 1)
            raise InputError(f"{name} has more than one column named {twice!r}; rename one of them")
        self._types = {f.name: plain_type(f.type) for f in schema}
        self._num_rows = num_rows if limit is None else min(num_rows, limit)
        if id_column is None and "id" in self._types:
            id_column = "id"
        self._id_column = None if id_column == NO_ID_COLUMN else id_column
        if self._id_column is not None and self._id_column not in self._types:
            raise self._missing_column(self._id_column, "take ids from")
        self._id_type, self._id_is_text = self._settle_id_type()
        self._counted_duplicates = False
        self._num_duplicate_ids: int | None = 0

    @abstractmethod
    def _record_batches(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """All rows from the beginning, at most ``batch_rows`` at a time (fewer where rows are
        big), with those of the columns that this part of the input has; the limit may be
        ignored, batches past it are never asked for."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._types)

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def id_column(self) -> str | None:
        return self._id_column

    @property
    def id_type(self) -> pa.DataType:
        return self._id_type

    @property
    def num_duplicate_ids(self) -> int | None:
        """Reads the id column once."""
        if self._id_column is None or self._counted_duplicates:
            return self._num_duplicate_ids
        if self._num_rows > MAX_COUNTED_IDS:
            self._num_duplicate_ids = None
        else:
            ids = IdCount(MAX_COUNTED_IDS)
            for batch in self._limited([self._id_column], 1 << 14):
                for value in plain_array(batch.column(0)).drop_null().to_pylist():
                    ids.add(str(value))
            self._num_duplicate_ids = ids.duplicates()
        self._counted_duplicates = True
        return self._num_duplicate_ids

    def scan(self) -> None:
        return

    def batches(
        self, columns: Collection[str] | None, batch_rows: int = DEFAULT_BATCH_ROWS
    ) -> Iterator[list[Row]]:
        wanted = [c for c in self._types if columns is None or c in columns]
        read = list(wanted)
        if self._id_column is not None and self._id_column not in wanted:
            read.append(self._id_column)
        rows: list[Row] = []
        num_bytes = 0
        index = 0
        for batch in self._limited(read, batch_rows):
            if rows and (len(rows) + batch.num_rows > batch_rows or num_bytes >= BATCH_BYTES):
                yield rows
                rows, num_bytes = [], 0
            rows.extend(self._rows(index, batch, wanted))
            num_bytes += batch.nbytes
            index += batch.num_rows
        if rows:
            yield rows

    def _limited(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        left = self._num_rows
        if left == 0:
            return
        for batch in self._record_batches(columns, batch_rows):
            if batch.num_rows:
                yield batch.slice(0, left)
            left -= min(left, batch.num_rows)
            if left == 0:
                return
        raise InputError(f"{self.name} ended {left} rows too early; is it damaged?")

    def _rows(self, first: int, batch: pa.RecordBatch, wanted: list[str]) -> Iterator[Row]:
        lists = {c: to_python(batch.column(c)) for c in batch.schema.names}
        suspects = [c for c, v in lists.items() if Unreadable in set(map(type, v))]
        names = [c for c in wanted if c in lists]
        ids = lists.get(self._id_column) if self._id_column is not None else None
        columns = [lists[c] for c in names]
        for i in range(batch.num_rows):
            index = first + i
            values = {n: c[i] for n, c in zip(names, columns, strict=True)}
            bad = next((c for c in suspects if isinstance(lists[c][i], Unreadable)), None)
            error = None
            if bad is not None:
                message = f"row {index}: the column {bad!r} cannot be read: {lists[bad][i].reason}"
                error = RowError(RowErrorCode.BAD_VALUE, message)
                values = {n: v for n, v in values.items() if not isinstance(v, Unreadable)}
            yield Row(index=index, id=self._id_of(ids, i, index), values=values, error=error)

    def _id_of(self, ids: list[Any] | None, i: int, index: int) -> Any:
        if self._id_column is None:
            return str(index)
        value = None if ids is None else ids[i]
        if value is None or isinstance(value, Unreadable):
            return None
        return str(value) if self._id_is_text else value

    def _settle_id_type(self) -> tuple[pa.DataType, bool]:
        """The type of ids, and whether they are text made of something else.

        Text is of one type however the input holds it: a job that moved to another format, or
        through another library, is the same job.
        """
        if self._id_column is None:
            return pa.string(), True
        type_, types = self._types[self._id_column], pa.types
        if types.is_string(type_) or types.is_large_string(type_):
            return pa.string(), False
        plain = (
            types.is_integer,
            types.is_float32,
            types.is_float64,
            types.is_boolean,
            types.is_decimal,
            types.is_date,
        )
        if any(test(type_) for test in plain):
            return type_, False
        if types.is_timestamp(type_) and type_.unit != "ns":
            return type_, False
        if types.is_temporal(type_) or types.is_null(type_):
            return pa.string(), True
        raise InputError(
            f"the id column {self._id_column!r} of {self.name} is of type {type_}; "
            f"an id must be text or a number"
        )

    def _keep_field(self, column: str) -> pa.Field:
        type_ = self._types[column]
        if pa.types.is_union(type_) or pa.types.is_interval(type_):
            raise InputError(
                f"the column {column!r} of {self.name} cannot be kept: "
                f"no result file can hold the type {type_}"
            )
        return pa.field(column, type_)

    def _keep_batches(
        self, columns: list[str], schema: pa.Schema, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        for batch in self._limited(columns, batch_rows):
            if not columns:
                yield empty_batch(batch.num_rows)
                continue
            there = set(batch.schema.names)
            arrays = [
                self._kept(batch.column(c), c, field.type)
                if c in there
                else pa.nulls(batch.num_rows, field.type)
                for c, field in zip(columns, schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _kept(self, array: pa.Array, column: str, type_: pa.DataType) -> pa.Array:
        try:
            return with_valid_text(plain_array(array, type_))
        except (pa.ArrowException, ValueError, OverflowError) as error:
            kinds = f"{array.type} as {type_}" if array.type != type_ else f"{type_}"
            raise InputError(
                f"the column {column!r} of {self.name} cannot be kept ({kinds}): "
                f"{first_line(error)}"
            ) from None


def slices(batch: pa.RecordBatch, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Views of a batch, at most ``batch_rows`` rows and about `BATCH_BYTES` each."""
    row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
    step = max(1, min(batch_rows, BATCH_BYTES // row_bytes))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)
