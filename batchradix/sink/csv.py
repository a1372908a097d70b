"""CSV as in RFC 4180: UTF-8, a header line, commas, CRLF line ends, quotes where needed.

Flat columns are written as bare text; structs, lists and maps as JSON text. Null is an empty
field, an empty string is ``""``. NaN and infinities are ``NaN``, ``inf`` and ``-inf``. The
schema's metadata has no place in the file; it is kept in the work folder's ``run.json``.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pyarrow as pa

from batchradix.sink.base import Writer
from batchradix.sink.json_text import json_texts, plain_texts

_NEEDS_QUOTES = re.compile(r'[",\r\n]|^\s|\s$|^$')


class CsvWriter(Writer):
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(path, schema)
        self._file = open(path, "wb")  # noqa: SIM115 - closed in close()
        self._write([_quoted(name) for name in schema.names])

    def write_batch(self, batch: pa.RecordBatch) -> None:
        columns = [_cells(column) for column in batch.columns]
        for cells in zip(*columns, strict=True):
            self._write(cells)

    def _write(self, cells: list[str] | tuple[str, ...]) -> None:
        self._file.write(",".join(cells).encode("utf-8") + b"\r\n")

    def close(self) -> None:
        self._file.close()


def _cells(column: pa.Array) -> list[str]:
    type_ = column.type
    if isinstance(type_, pa.BaseExtensionType):
        return _cells(column.storage)
    if pa.types.is_dictionary(type_):
        return _cells(column.cast(type_.value_type))
    if pa.types.is_floating(type_):
        words = zip(json_texts(column), column.to_pylist(), strict=True)
        return ["" if x is None else _float(text, x) for text, x in words]
    if pa.types.is_nested(type_) or pa.types.is_boolean(type_) or pa.types.is_decimal(type_):
        valid = column.is_valid().to_pylist()
        texts = zip(json_texts(column), valid, strict=True)
        return [_quoted(text) if ok else "" for text, ok in texts]
    return ["" if text is None else _quoted(text) for text in plain_texts(column)]


def _float(text: str, x: float) -> str:
    if math.isfinite(x):
        return text
    return "NaN" if math.isnan(x) else "inf" if x > 0 else "-inf"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if _NEEDS_QUOTES.search(text) else text
