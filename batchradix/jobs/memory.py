"""Input that is already in memory: tables, frames, data sets, lists of dicts or of prompts."""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from batchradix.errors import InputError, RowError, RowErrorCode
from batchradix.jobs.arrow import TableInMemorySource, open_reader
from batchradix.jobs.base import JobSource
from batchradix.jobs.openai_batch import OpenAIBatchSource
from batchradix.jobs.records import Record, RecordSource, empty_batch
from batchradix.jobs.tables import TableSource

_ASSUMED_RECORD_BYTES = 1024


def open_memory(data: Any, *, id_column: str | None, limit: int | None) -> JobSource:
    """A source over an object in memory, known by what it can do and not by its class.

    A `pyarrow.Table` or ``RecordBatch``; a ``RecordBatchReader`` and what gives one (a DuckDB
    relation), which need not fit the memory; whatever has ``to_arrow()`` (a Polars frame) or the
    Arrow stream interface (a pandas frame); a `datasets.Dataset`; a list of dicts; a list of
    strings, which are prompts. Raises `InputError` for anything else.
    """
    settings: dict[str, Any] = {"id_column": id_column, "limit": limit}
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return TableInMemorySource(data, **settings)
    if callable(getattr(data, "to_arrow_reader", None)):
        data = data.to_arrow_reader()
    if isinstance(data, pa.RecordBatchReader):
        return open_reader(data, **settings)
    if isinstance(data, (list, tuple)):
        return RecordListSource(data, **settings)
    if isinstance(data, dict) and hasattr(data, "with_format"):
        splits = ", ".join(map(str, data))
        raise InputError(f"the data set has several splits; choose one of them: {splits}")
    if all(hasattr(data, a) for a in ("with_format", "features", "column_names", "num_rows")):
        return DatasetSource(data, **settings)
    table = _as_table(data)
    if table is not None:
        return TableInMemorySource(table, "the frame", **settings)
    advice = ""
    if hasattr(data, "collect"):
        advice = "; call collect() on it first"
    elif hasattr(data, "features"):
        advice = "; a streamed data set can be read once only, so load it without streaming"
    kind = f"{type(data).__module__}.{type(data).__qualname__}"
    raise InputError(
        f"a {kind} is no input; "
        f"give a path, a table, a frame, a data set or a list of dicts{advice}"
    )


def open_requests(
    items: Sequence[Any], *, id_column: str | None, limit: int | None
) -> OpenAIBatchSource:
    """A source over a list of requests as they stand in an OpenAI batch file."""

    def records() -> Iterator[tuple[str, Record]]:
        for number, item in enumerate(items, 1):
            fields = _fields(number - 1, item)
            yield "the list", Record(number, fields, _ASSUMED_RECORD_BYTES)

    return OpenAIBatchSource("the list", records, id_column=id_column, limit=limit)


def _as_table(data: Any) -> pa.Table | None:
    try:
        if callable(getattr(data, "to_arrow", None)):
            table = data.to_arrow()
            return table if isinstance(table, pa.Table) else None
        if hasattr(data, "__arrow_c_stream__"):
            return pa.table(data)
    except Exception as error:
        raise InputError(f"the frame cannot be had as an Arrow table: {error}") from error
    return None


class RecordListSource(RecordSource):
    """A list of dicts, or of strings, each of which is the ``prompt`` of a row."""

    def __init__(
        self, items: Sequence[Any], *, id_column: str | None = None, limit: int | None = None
    ) -> None:
        super().__init__("the list", id_column=id_column, limit=limit)
        self._items = items

    def _records(self) -> Iterator[Record]:
        for index, item in enumerate(self._items):
            yield Record(None, _fields(index, item), _ASSUMED_RECORD_BYTES)


def _fields(index: int, item: Any) -> dict[str, Any] | RowError:
    if isinstance(item, str):
        return {"prompt": item}
    if not isinstance(item, dict):
        problem = f"is of type {type(item).__name__}, not a dict or a string"
    elif not all(isinstance(name, str) for name in item):
        problem = "has a field whose name is not a string"
    elif (nested := next((name for name in item if not _is_json(item[name])), None)) is not None:
        problem = f"holds in field {nested!r} what JSON cannot: itself, or keys that are no text"
    else:
        return {name: _python_scalar(value) for name, value in item.items()}
    return RowError(RowErrorCode.BAD_LINE, f"row {index} {problem}")


def _is_json(value: Any) -> bool:
    """Whether a value nests as JSON does; what other objects are is not looked at."""
    if not isinstance(value, (dict, list, tuple)):
        return True
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _python_scalar(value: Any) -> Any:
    """Numbers and text of another library (numpy's, say) as Python's own; all else as it is."""
    if value is None or isinstance(value, (int, dict, list)):
        return value
    if isinstance(value, (str, float)):
        return str(value) if isinstance(value, str) else float(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    is_real = isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational)
    return float(value) if is_real else value


class DatasetSource(TableSource):
    """A `datasets.Dataset`, read in Arrow slices so that selections and shuffles are honoured."""

    def __init__(
        self, dataset: Any, *, id_column: str | None = None, limit: int | None = None
    ) -> None:
        self._dataset = dataset
        names = dataset.column_names
        schema = dataset.data.table.schema
        schema = pa.schema([schema.field(name) for name in names])
        super().__init__("the data set", schema, dataset.num_rows, id_column=id_column, limit=limit)

    def _record_batches(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        num_rows = self._dataset.num_rows
        view = self._dataset.with_format("arrow", columns=columns) if columns else None
        for start in range(0, num_rows, batch_rows):
            stop = min(start + batch_rows, num_rows)
            if view is None:
                yield empty_batch(stop - start)
            else:
                yield from view[start:stop].select(columns).to_batches()
