"""Parquet files: read by row group, only the columns wanted, in batches of bounded bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchradix.errors import InputError
from batchradix.jobs.base import BATCH_BYTES
from batchradix.jobs.files import InputFile, first_line
from batchradix.jobs.table_files import TableFile, TableFilesSource

_READ_BUFFER_BYTES = 1 << 20
_REQUEST_BYTES = 8 << 20
# A dictionary can hide any number of repetitions in a column chunk of this size or more.
_PROBE_BYTES = 8 << 20


class ParquetSource(TableFilesSource):
    """One Parquet file or several, one after the other."""

    def __init__(self, name: str, files: Sequence[InputFile], **settings: Any) -> None:
        super().__init__(name, [_ParquetFile(file) for file in files], **settings)


class _ParquetFile(TableFile):
    def __init__(self, file: InputFile) -> None:
        self.file = file
        with _open(file) as parquet:
            self._footer = parquet.metadata
            self.schema = parquet.schema_arrow
        self.num_rows = self._footer.num_rows

    def batches(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        with _open(self.file, self._footer) as parquet:
            for group in range(self._footer.num_row_groups):
                with _damage_in(self.file, f"row group {group}"):
                    yield from _group_batches(parquet, group, columns, batch_rows)


@contextlib.contextmanager
def _open(file: InputFile, footer: Any = None) -> Iterator[pq.ParquetFile]:
    file.check_unchanged()
    with contextlib.ExitStack() as stack:
        source = file.parquet_source()
        if hasattr(source, "close"):
            stack.callback(source.close)
        with _damage_in(file, "its footer"):
            parquet = pq.ParquetFile(
                source,
                metadata=footer,
                pre_buffer=False,
                buffer_size=_READ_BUFFER_BYTES if isinstance(source, str) else _REQUEST_BYTES,
                page_checksum_verification=True,
                # In nanoseconds Arrow would wrap years before 1677 and after 2262 around.
                coerce_int96_timestamp_unit="us",
            )
        with parquet:
            yield parquet


@contextlib.contextmanager
def _damage_in(file: InputFile, part: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{file.name} is damaged, cut short or not Parquet after all; "
            f"reading {part} failed: {first_line(error)}"
        ) from None


def _group_batches(
    parquet: pq.ParquetFile, group: int, names: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    chunks = _chunks(parquet.metadata.row_group(group), names)
    row_bytes = sum(c.total_uncompressed_size for c in chunks) // max(
        1, parquet.metadata.row_group(group).num_rows
    )
    if any(c.has_dictionary_page and c.total_uncompressed_size >= _PROBE_BYTES for c in chunks):
        probe = parquet.iter_batches(batch_size=1, row_groups=[group], columns=names)
        row_bytes = max(row_bytes, *(batch.nbytes for batch in islice(probe, 1)))
    batch_size = max(1, min(batch_rows, BATCH_BYTES // max(1, row_bytes)))
    num_done = 0
    while num_done < parquet.metadata.row_group(group).num_rows:
        batches = parquet.iter_batches(batch_size=batch_size, row_groups=[group], columns=names)
        try:
            for batch in _behind(num_done, batches):
                num_done += batch.num_rows
                # A dotted name also brings in the field of that path; `select` leaves it out again.
                yield batch.select(names)
        except pa.ArrowNotImplementedError:  # a nested column has over 2 GiB in one batch
            if batch_size == 1:
                raise
            batch_size = max(1, batch_size // 8)


def _behind(num_rows: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What comes after so many rows."""
    for batch in batches:
        if num_rows < batch.num_rows:
            yield batch.slice(num_rows)
        num_rows -= min(num_rows, batch.num_rows)


def _chunks(row_group: Any, names: list[str]) -> list[Any]:
    """The column chunks below the top-level columns of these names."""
    wanted = set(names)
    found = (row_group.column(i) for i in range(row_group.num_columns))
    return [c for c in found if any(path in wanted for path in _ancestors(c.path_in_schema))]


def _ancestors(path: str) -> Iterator[str]:
    """The path and what it can lie below; a dot may also be part of a name."""
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
