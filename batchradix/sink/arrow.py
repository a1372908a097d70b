"""Arrow IPC file format, uncompressed: readers map it into memory without a copy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa

from batchradix.sink.base import Writer
from batchradix.sink.dictionaries import DictionaryUnion


class ArrowWriter(Writer):
    """One record batch a `write_batch`; the schema's metadata is the file's.

    The format allows one dictionary a field. Where the schema has dictionaries, batches go to
    a spool file beside the output first and the file is written at `close`.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(path, schema)
        self._union = DictionaryUnion(schema)
        self._spool = path.with_name(path.name + ".spool")
        if self._union.needed:
            self._file = pa.OSFile(str(self._spool), "wb")
            self._writer = pa.ipc.new_stream(self._file, self._union.index_schema)
        else:
            self._file = pa.OSFile(str(path), "wb")
            self._writer = pa.ipc.new_file(self._file, schema)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(self._union.index(batch) if self._union.needed else batch)

    def close(self) -> None:
        self._writer.close()
        self._file.close()
        if not self._union.needed:
            return
        with (
            pa.OSFile(str(self._spool), "rb") as source,
            pa.OSFile(str(self.path), "wb") as target,
            pa.ipc.new_file(target, self.schema) as writer,
        ):
            for batch in pa.ipc.open_stream(source):
                writer.write_batch(self._union.restore(batch))
        self._spool.unlink()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(Exception):
            self._file.close()
