"""What every output format does: take record batches in order, then close."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from batchradix.types import Result


class Writer(ABC):
    """Writes one file of a fixed schema; the same batches always give the same bytes.

    Raises `OSError` when the file cannot be written and ``pa.ArrowException`` when the format
    cannot hold a column.
    """

    errors: Path | None = None
    """A second file, of the rows that failed, where the format has one; complete after `close`."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema

    @abstractmethod
    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Appends the rows of ``batch``, whose schema is the writer's."""

    @abstractmethod
    def close(self) -> None:
        """Completes the file; called once."""

    def abandon(self) -> None:
        """Lets go of the file, complete or not, after an error; raises nothing."""
        with contextlib.suppress(Exception):
            self.close()


class ResultSink(Protocol):
    """Where the pipeline puts results as they come: `shards.ShardWriter`, `memory.MemorySink`."""

    def append(self, result: Result) -> None:
        """Takes one finished row; it may be committed with this call or a later one."""
        ...

    def commit_if_due(self) -> None:
        """To be called now and then, so that rows do not wait for a next one to come."""
        ...

    def commit(self) -> None:
        """Commits every row taken so far."""
        ...
