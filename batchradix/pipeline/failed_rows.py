"""The input rows that failed, as a file that is ready to be run again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchradix.config import OutputOptions
from batchradix.errors import OptionError, RowErrorCode, SinkError
from batchradix.jobs.base import JobSource
from batchradix.sink.durable import publish
from batchradix.sink.formats import open_writer

FORMATS = (".jsonl", ".parquet", ".arrow")


def check_failed_rows(output: OutputOptions, source: JobSource) -> None:
    """Raises `OptionError` when the file ``output.failed_rows`` cannot be written, or is the input
    or the output."""
    path = output.failed_rows
    assert path is not None
    if path.suffix.lower() not in FORMATS:
        raise OptionError(f"the file of failed rows {path} must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise OptionError(
            f"the file of failed rows {path} cannot be written: {path.parent} is no folder, or "
            f"not writable"
        )
    real = os.path.realpath(path)
    others = [*source.paths, output.path, output.errors_path]
    if any(other is not None and os.path.realpath(other) == real for other in others):
        raise OptionError(f"the file of failed rows {path} is the input or the output of the job")


def write_failed_rows(path: Path, source: JobSource, failed: NDArray[np.bool_]) -> int:
    """Replaces ``path`` by the rows marked in ``failed`` (bool[n]), all their columns, in input
    order; no file where there are none.

    Returns how many rows are in it: rows that could not be read as such have no columns and
    are left out. Raises `SinkError` when it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if not failed.any():
            path.unlink(missing_ok=True)
            return 0
        if path.suffix.lower() == ".jsonl":
            count = _write_json_lines(partial, source, failed)
        else:
            count = _write_table(partial, path.suffix.lower(), source, failed)
        publish(partial, path)
        return count
    except (OSError, pa.ArrowException) as error:
        raise SinkError(f"the failed rows cannot be written to {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_json_lines(path: Path, source: JobSource, failed: NDArray[np.bool_]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for rows in source.input_batches(None):
            for row in rows:
                if failed[row.index] and not _is_unreadable(row):
                    values = {name: _plain(value) for name, value in row.values.items()}
                    file.write(json.dumps(values, ensure_ascii=False, default=str) + "\n")
                    count += 1
    return count


def _write_table(path: Path, extension: str, source: JobSource, failed: NDArray[np.bool_]) -> int:
    readable = np.ones(len(failed), dtype=bool)
    for rows in source.input_batches(()):
        for row in rows:
            readable[row.index] = not _is_unreadable(row)
    wanted = failed & readable
    schema = source.own_schema()
    writer = open_writer(path, extension, schema)
    try:
        for batch in chosen_rows(source.own_batches(), wanted):
            writer.write_batch(batch)
    finally:
        writer.close()
    return int(wanted.sum())


def chosen_rows(
    batches: Iterator[pa.RecordBatch], wanted: NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    """The rows of batches that are marked in ``wanted`` (bool[n]), in order."""
    first = 0
    for batch in batches:
        here = np.flatnonzero(wanted[first : first + batch.num_rows])
        first += batch.num_rows
        if len(here) == batch.num_rows:
            yield batch
        elif len(here):
            yield batch.take(pa.array(here))


def _is_unreadable(row: Any) -> bool:
    return row.error is not None and row.error.code is RowErrorCode.BAD_LINE


def _plain(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
