"""Results of a run without an output path: a table in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from batchradix.errors import SinkError
from batchradix.sink.columns import EncodeValues, results_to_batch
from batchradix.sink.finalise import zip_columns
from batchradix.sink.ordering import in_order
from batchradix.types import I64, Result

_BATCH_ROWS = 256


class MemorySink:
    """Takes results as `shards.ShardWriter` does and gives the finished table at the end."""

    def __init__(self, schema: pa.Schema, encode_values: EncodeValues | None) -> None:
        """``schema`` is that of `columns.shard_schema`."""
        self._schema = schema
        self._encode_values = encode_values
        self._waiting: list[Result] = []
        self._batches: list[pa.RecordBatch] = []

    def append(self, result: Result) -> None:
        self._waiting.append(result)
        if len(self._waiting) >= _BATCH_ROWS:
            self.commit()

    def commit_if_due(self) -> None:
        """Nothing is ever due: there is no disk to commit to."""

    def commit(self) -> None:
        if self._waiting:
            self._batches.append(results_to_batch(self._waiting, self._schema, self._encode_values))
            self._waiting = []

    def finish(
        self,
        *,
        schema: pa.Schema,
        num_rows: int,
        keep_batches: Iterator[pa.RecordBatch] | None = None,
        unnest: bool = False,
        starts: I64 | None = None,
        rows: I64 | None = None,
    ) -> pa.Table:
        """The table in input order; arguments and errors as in `finalise.finalise`."""
        num_rows = num_rows if rows is None else len(rows)
        parts = zip_columns(
            self.ordered(num_rows, rows),
            schema,
            keep_batches,
            num_rows=num_rows,
            unnest=unnest,
            starts=starts,
            rows=rows,
        )
        return pa.Table.from_batches(list(parts), schema=schema)

    def ordered(self, num_rows: int, rows: I64 | None = None) -> Iterator[pa.RecordBatch]:
        """The results as they are in shards, in input order. ``rows``: int64[num_rows], ascending,
        the rows there are results of; from 0 on when None. Raises `SinkError` where some are
        missing or doubled."""
        self.commit()
        targets = [b.column("row").to_numpy() for b in self._batches]
        if rows is not None:
            targets = [np.searchsorted(rows, numbers) for numbers in targets]
        every = np.concatenate([np.zeros(0, np.int64), *targets])
        if len(every) != num_rows or not np.array_equal(np.sort(every), np.arange(num_rows)):
            found = len(np.unique(every[(every >= 0) & (every < num_rows)]))
            raise SinkError(
                f"the results do not make up the input's {num_rows} rows: "
                f"{num_rows - found} missing, {len(every) - found} doubled or beyond it"
            )
        return in_order(zip(self._batches, targets, strict=True), num_rows)
