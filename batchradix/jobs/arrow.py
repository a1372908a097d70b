"""Arrow data: IPC files and streams on disk, and tables in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from batchradix.errors import InputError
from batchradix.jobs.arrow_values import check_array, plain_array, plain_type
from batchradix.jobs.files import InputFile, Spool, first_line
from batchradix.jobs.records import empty_batch
from batchradix.jobs.table_files import TableFile, TableFilesSource
from batchradix.jobs.tables import TableSource, slices

FILE_MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"
_END_OF_STREAM = STREAM_MAGIC + bytes(4)


class TableInMemorySource(TableSource):
    """A `pyarrow.Table`; its columns are read in place, in slices."""

    def __init__(
        self,
        table: pa.Table,
        name: str = "the table",
        *,
        id_column: str | None = None,
        limit: int | None = None,
    ) -> None:
        self._table = table
        super().__init__(name, table.schema, table.num_rows, id_column=id_column, limit=limit)

    def _record_batches(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        if not columns:
            for start in range(0, self._table.num_rows, batch_rows):
                yield empty_batch(min(batch_rows, self._table.num_rows - start))
            return
        for batch in self._table.select(columns).to_batches():
            yield from slices(batch, batch_rows)


class ArrowFileSource(TableFilesSource):
    """Arrow IPC files (also Feather 2) or streams, one after the other."""

    def __init__(self, name: str, files: Sequence[InputFile], **settings: Any) -> None:
        found = [_ArrowFile(file) for file in files]
        super().__init__(name, found, **settings)
        for file in found:
            if not file.has_end:
                self.notices.append(
                    f"{file.file.name} has {file.num_rows:,} rows and no mark at its end: whatever "
                    f"wrote it was stopped, or it was cut short"
                )


class _ArrowFile(TableFile):
    """An Arrow IPC file or stream, mapped into memory, batch after batch."""

    def __init__(self, file: InputFile) -> None:
        self.file = file
        self._is_stream = not file.head(len(FILE_MAGIC)).startswith(FILE_MAGIC)
        with _damage_in(file), _mapped(file) as mapped:
            reader = self._reader(mapped, None)
            self.schema = reader.schema
            is_stream = self._is_stream
            self.num_rows = sum(b.num_rows for b in reader) if is_stream else reader.count_rows()
            mapped.seek(max(0, file.size_bytes - len(_END_OF_STREAM)))
            self.has_end = not is_stream or mapped.read() == _END_OF_STREAM
        self._indices = {c: i for i, c in enumerate(self.schema.names)}

    def _reader(self, mapped: Any, fields: list[int] | None) -> Any:
        # An empty list of fields would mean all of them; one column is then read for its length.
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        read = pa.ipc.open_stream if self._is_stream else pa.ipc.open_file
        return read(mapped, options=options)

    def batches(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        fields = [self._indices[c] for c in columns] or [0]
        with _damage_in(self.file), _mapped(self.file) as mapped:
            reader = self._reader(mapped, fields if self._indices else None)
            for batch in reader if self._is_stream else _all_batches(reader):
                chosen = batch.select(columns)
                # Offsets from a file are trusted by nothing below, so check them here.
                for array in chosen.columns:
                    check_array(array)
                yield from slices(chosen, batch_rows)


def open_reader(
    reader: pa.RecordBatchReader, *, id_column: str | None, limit: int | None
) -> ArrowFileSource:
    """A source over a stream, which is copied to a temporary file, batch after batch; that is
    deleted when the source is closed. Raises `InputError` when the stream or the disk fails."""
    name = "the stream"
    spool = Spool(_messages(reader, name), name)
    try:
        source = ArrowFileSource(name, [spool.file], id_column=id_column, limit=limit)
    except BaseException:
        spool.close()
        raise
    source.hold(spool)
    return source


def _messages(reader: pa.RecordBatchReader, name: str) -> Iterator[Any]:
    """A stream in Arrow's IPC format, in plain types, which need no messages of dictionaries."""
    types = [plain_type(field.type) for field in reader.schema]
    schema = pa.schema(list(zip(reader.schema.names, types, strict=True)))
    yield schema.serialize()
    try:
        for batch in reader:
            arrays = [plain_array(*pair) for pair in zip(batch.columns, types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema).serialize()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name} cannot be read to its end: {first_line(error)}") from None
    yield _END_OF_STREAM


def _all_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)


@contextlib.contextmanager
def _mapped(file: InputFile) -> Iterator[Any]:
    file.check_unchanged()
    with pa.memory_map(str(file.path)) as mapped:
        yield mapped


@contextlib.contextmanager
def _damage_in(file: InputFile) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{file.name} is damaged, cut short or not Arrow after all: {first_line(error)}"
        ) from None
