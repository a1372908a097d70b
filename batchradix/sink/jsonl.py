"""JSON Lines: UTF-8, one object a line, ``\\n`` line ends; values as `sink.json_text` says.

Every column of the schema is in every object, so an answer's optional field that is absent is
written as ``null``. ``error`` is ``null`` or an object of code and message. The schema's
metadata has no place in the file; it is kept in the work folder's ``run.json``.
"""

from __future__ import annotations

from json.encoder import encode_basestring as quote
from pathlib import Path

import pyarrow as pa

from batchradix.sink.base import Writer
from batchradix.sink.json_text import json_texts, object_texts


class JsonlWriter(Writer):
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(path, schema)
        self._fields = list(schema)
        self._names = [quote(name) for name in schema.names]
        self._file = open(path, "wb")  # noqa: SIM115 - closed in close()

    def write_batch(self, batch: pa.RecordBatch) -> None:
        columns = [
            json_texts(column, field)
            for column, field in zip(batch.columns, self._fields, strict=True)
        ]
        for line in object_texts(self._names, columns, batch.num_rows):
            self._file.write(line.encode("utf-8"))
            self._file.write(b"\n")

    def close(self) -> None:
        self._file.close()
