"""Which output formats there are: a file extension and the class that writes it.

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


def open_writer(path: Path, extension: str, schema: Any) -> Writer:
    """The writer of ``extension`` on a new file at ``path``. Raises as `Writer` does."""
    module, name = WRITERS[extension].split(":")
    writer: Writer = getattr(importlib.import_module(module), name)(path, schema)
    return writer


def check_format(output: str | os.PathLike[str], schema: Any) -> None:
    """Tries the format on a table without rows, so that a schema it cannot hold is refused
    before any work. Raises `OptionError`."""
    import pyarrow as pa

    extension = output_format(output)
    with tempfile.TemporaryDirectory(prefix="batchradix-") as folder:
        try:
            writer = open_writer(Path(folder) / f"probe{extension}", extension, schema)
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
            writer.close()
        except pa.ArrowException as e:
            raise OptionError(
                f"the output {os.fspath(output)} cannot hold these columns: {e}; "
                f"choose another format"
            ) from e
