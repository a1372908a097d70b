"""The table a run fills: committed shards and then a file, or memory.

It joins the columns of `intake` with the `sink`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from batchradix.config import OutputOptions
from batchradix.jobs.base import JobSource
from batchradix.pipeline.intake import Intake
from batchradix.report.summary import Summary
from batchradix.schema.output_schema import OutputSchema
from batchradix.sink.columns import result_schema, shard_schema
from batchradix.sink.finalise import finalise
from batchradix.sink.folder import RunFolder, is_finished
from batchradix.sink.formats import check_format
from batchradix.sink.memory import MemorySink
from batchradix.sink.shards import ShardWriter, load_shard, match_rows, read_committed
from batchradix.types import I64, Result, Status


def _mark_value(columns: pa.Schema, schema: OutputSchema | None) -> pa.Schema:
    """The columns with the answer's field as its schema marks it (JSON text or not)."""
    if schema is None or "value" not in columns.names:
        return columns
    return columns.set(columns.get_field_index("value"), schema.arrow_field("value"))


class Table:
    """Takes every row's result once and becomes the finished table.

    With a ``folder`` (its fingerprint checked) rows that an earlier run committed are done
    already; without one results stay in memory. ``metadata`` goes into the finished file.
    """

    def __init__(
        self,
        rows: Intake,
        *,
        source: JobSource,
        schema: OutputSchema | None,
        options: OutputOptions,
        metadata: Mapping[str, str],
        fingerprint: Mapping[str, Any],
        folder: RunFolder | None,
    ) -> None:
        self._rows = rows
        self._source = source
        self._options = options
        self._folder = folder
        self._fingerprint = fingerprint
        self._counts = Summary()
        self.warnings: tuple[str, ...] = ()
        value_type = None if schema is None else schema.arrow_type
        keep = source.keep_schema(options.keep) if options.keep else None
        self._schema = _mark_value(
            result_schema(
                id_type=source.id_type,
                value_type=value_type,
                keep=keep,
                unnest=options.unnest,
                keep_truncated=options.keep_truncated,
                metadata={**metadata, "batchradix.table": self._digest(keep)},
            ),
            schema,
        )
        encode = None if schema is None else schema.to_arrow
        inner = shard_schema(id_type=source.id_type, value_type=value_type)
        done = np.zeros(len(rows), dtype=bool)
        self._sink: ShardWriter | MemorySink
        if folder is None:
            self._sink = MemorySink(inner, encode)
        else:
            check_format(folder.output, self._schema)
            done = self._resume(folder)
            self._sink = ShardWriter(folder, inner, encode)
        self._waiting = np.flatnonzero(~done).astype(np.int64)
        self._num_resumed = self._num_done = int(done.sum())

    def _digest(self, keep: pa.Schema | None) -> str:
        """Names what the finished file is made of beside the committed answers."""
        digest = hashlib.sha256(self._rows.content_keys.tobytes())
        chunks = self._rows.ids.chunks if isinstance(self._rows.ids, pa.ChunkedArray) else None
        for chunk in chunks if chunks is not None else [self._rows.ids]:
            digest.update(pa.record_batch([chunk], names=["id"]).serialize())
        digest.update(json.dumps([self._options.unnest, self._options.keep_truncated]).encode())
        if keep is not None:
            digest.update(keep.serialize())
            for batch in self._source.keep_batches(self._options.keep):
                digest.update(batch.serialize())
        return digest.hexdigest()

    def _resume(self, folder: RunFolder) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool[n]: rows whose answers are committed; counts them."""
        committed = read_committed(folder)
        self.warnings = committed.warnings
        record_of_row = match_rows(committed, len(self._rows), self._rows.content_keys)
        used = np.zeros(len(committed), dtype=bool)
        used[record_of_row[record_of_row >= 0]] = True
        for number, path in enumerate(committed.shards):
            positions = committed.positions[(committed.shard_of == number) & used]
            if len(positions):
                self._count_batch(load_shard(folder, path).take(pa.array(positions)))
        done: np.ndarray[Any, np.dtype[np.bool_]] = record_of_row >= 0
        return done

    def _count_batch(self, batch: pa.RecordBatch) -> None:
        for status, error, tokens in zip(
            batch.column("status").to_pylist(),
            batch.column("error").to_pylist(),
            batch.column("completion_tokens").to_pylist(),
            strict=True,
        ):
            self._counts.count(Status(status), None if error is None else error["code"])
            self._counts.completion_tokens += tokens

    @property
    def waiting(self) -> I64:
        """int64[m]: rows that had no committed answer when the table was opened."""
        return self._waiting

    @property
    def num_done(self) -> int:
        """Rows that have their result."""
        return self._num_done

    def append(self, result: Result) -> None:
        """Takes one result; commits when it is time to. Raises `SinkError`."""
        self._num_done += 1
        self._counts.count(result.status, None if result.error is None else result.error.code)
        self._counts.completion_tokens += result.completion_tokens
        self._sink.append(result)

    def commit_if_due(self) -> None:
        """Commits what has waited for some seconds. Raises `SinkError`."""
        self._sink.commit_if_due()

    def commit(self) -> None:
        """Commits everything taken so far. Raises `SinkError`."""
        self._sink.commit()

    def count(self, summary: Summary) -> None:
        """Writes the counts of all rows that are done into ``summary``."""
        for name in ("rows", "ok", "truncated", "errors", "completion_tokens", "error_codes"):
            setattr(summary, name, getattr(self._counts, name))
        summary.resumed_rows = self._num_resumed

    def finish(self) -> pa.Table | None:
        """The finished table: written to its file (None), or returned.

        A file that is finished already is left as it is. Raises `SinkError` and, when kept
        columns no longer fit the rows, `InputError`.
        """
        options, num_rows = self._options, len(self._rows)
        if isinstance(self._sink, MemorySink):
            return self._sink.finish(
                schema=self._schema,
                num_rows=num_rows,
                keep_batches=self._kept(),
                unnest=options.unnest,
            )
        assert self._folder is not None
        assert options.path is not None
        self._sink.commit()
        metadata = {k.decode(): v.decode() for k, v in self._schema.metadata.items()}
        if not is_finished(self._folder, self._fingerprint, options.path, metadata):
            finalise(
                self._folder,
                options.path,
                schema=self._schema,
                num_rows=num_rows,
                key_of_row=self._rows.content_keys,
                keep_batches=self._kept(),
                unnest=options.unnest,
                ids=self._rows.ids,
            )
        return None

    def _kept(self) -> Any:
        return self._source.keep_batches(self._options.keep) if self._options.keep else None
