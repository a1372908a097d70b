"""Which output formats there are: a file extension, the class that writes it, reading back.

A new format is one new file and one line here.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchradix.errors import OptionError

if TYPE_CHECKING:
    from batchradix.sink.base import Writer

WRITERS = {
    ".arrow": "batchradix.sink.arrow:ArrowWriter",
    ".parquet": "batchradix.sink.parquet:ParquetWriter",
    ".jsonl": "batchradix.sink.jsonl:JsonlWriter",
    ".csv": "batchradix.sink.csv:CsvWriter",
}
NAMED_WRITERS = {"openai": "batchradix.sink.openai_batch:OpenAIBatchWriter"}
"""Formats that are asked for by name, whatever the extension."""


def output_format(path: str | os.PathLike[str]) -> str:
    """The extension that decides the format, in lower case. Raises `OptionError`."""
    shown = os.fspath(path)
    if "://" in shown:
        raise OptionError(f"the output {shown} is not a local file; write locally and copy it")
    extension = Path(shown).suffix.lower()
    if extension not in WRITERS:
        known = ", ".join(WRITERS)
        what = f"the extension {extension}" if extension else "no extension"
        raise OptionError(f"the output {shown} has {what}; known are {known}")
    return extension


def open_writer(path: Path, format_: str, schema: Any) -> Writer:
    """The writer of ``format_`` (an extension, or a name) on a new file at ``path``. Raises as
    `Writer` does."""
    module, name = (WRITERS | NAMED_WRITERS)[format_].split(":")
    writer: Writer = getattr(importlib.import_module(module), name)(path, schema)
    return writer


def check_format(output: str | os.PathLike[str], schema: Any, format_: str | None = None) -> None:
    """Tries the format (``format_``, or that of the extension) on a table without rows, so that a
    schema it cannot hold is refused before any work. Raises `OptionError`."""
    import pyarrow as pa

    extension = output_format(output)
    with tempfile.TemporaryDirectory(prefix="batchradix-") as folder:
        try:
            writer = open_writer(Path(folder) / f"probe{extension}", format_ or extension, schema)
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
            writer.close()
        except pa.ArrowException as e:
            raise OptionError(
                f"the output {os.fspath(output)} cannot hold these columns: {e}; "
                f"choose another format"
            ) from e


def read_table(path: str | os.PathLike[str]) -> Any:
    """A finished file as a ``pa.Table``.

    Arrow files are mapped into memory; JSONL and CSV hold no types, so polars infers them from
    all rows. Raises `OptionError` for an unknown extension and `OSError`.
    """
    import pyarrow as pa

    extension = output_format(path)
    if extension == ".arrow":
        with pa.memory_map(os.fspath(path)) as source:
            return pa.ipc.open_file(source).read_all()
    if extension == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path)
    import polars as pl

    if extension == ".csv":
        return pl.read_csv(Path(path), infer_schema_length=None).to_arrow()
    if not os.path.getsize(path):
        return pa.table({})
    return pl.read_ndjson(Path(path), infer_schema_length=None).to_arrow()


def read_batches(path: str | os.PathLike[str]) -> Any:
    """A finished file as a ``pa.RecordBatchReader``; Arrow and Parquet are read as it goes on.

    Types and errors as `read_table`.
    """
    import pyarrow as pa

    extension = output_format(path)
    if extension == ".arrow":
        file = pa.ipc.open_file(pa.memory_map(os.fspath(path)))
        batches = (file.get_batch(i) for i in range(file.num_record_batches))
        return pa.RecordBatchReader.from_batches(file.schema, batches)
    if extension == ".parquet":
        import pyarrow.parquet as pq

        parquet = pq.ParquetFile(path)
        schema = parquet.schema_arrow
        return pa.RecordBatchReader.from_batches(schema, parquet.iter_batches())
    return read_table(path).to_reader()
