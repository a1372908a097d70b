"""JSON Lines: UTF-8, one object a line, ``\\n`` line ends; values as `sink.json_text` says.

Every column of the schema is in every object. ``value`` is the answer itself, so an optional
field that the model left out is left out here too, and what is written is as valid as what was
checked; columns have no other word for it than null. (Answers that are no JSON are written from
their column.) ``error`` is ``null`` or an object of code
and message. The schema's metadata has no place in the file; it is kept in the work folder's
``run.json``.
"""

from __future__ import annotations

from json.encoder import encode_basestring as quote
from pathlib import Path

import pyarrow as pa

from batchradix.schema.answers import is_written_from_value
from batchradix.sink.base import Writer
from batchradix.sink.json_text import embedded, is_json, json_texts, object_texts
from batchradix.types import Status


class JsonlWriter(Writer):
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(path, schema)
        self._fields = list(schema)
        self._names = [quote(name) for name in schema.names]
        self._has_answers = {"status", "value", "text"} <= set(schema.names) and not (
            is_written_from_value(schema.field("value"))
        )
        self._file = open(path, "wb")  # noqa: SIM115 - closed in close()

    def write_batch(self, batch: pa.RecordBatch) -> None:
        columns = [
            json_texts(column, field)
            for column, field in zip(batch.columns, self._fields, strict=True)
        ]
        if self._has_answers:
            value = self.schema.get_field_index("value")
            columns[value] = _answers(batch, columns[value])
        for line in object_texts(self._names, columns, batch.num_rows):
            self._file.write(line.encode("utf-8"))
            self._file.write(b"\n")

    def close(self) -> None:
        self._file.close()


def _answers(batch: pa.RecordBatch, values: list[str]) -> list[str]:
    """The text of every answer that is ok, which its check has found to be strict JSON."""
    is_ok = [status == Status.OK for status in batch.column("status").to_pylist()]
    texts = batch.column("text").to_pylist()
    return [
        embedded(x) if ok and is_json(x) else value
        for ok, x, value in zip(is_ok, texts, values, strict=True)
    ]
