"""Parquet, zstd-compressed, with the Arrow schema stored beside Parquet's own."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchradix.sink.base import Writer

ROW_GROUP_ROWS = 131_072
ROW_GROUP_BYTES = 128 << 20


class ParquetWriter(Writer):
    """Row groups of up to 131,072 rows or 128 MiB in memory, whichever comes first."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(path, schema)
        self._writer = pq.ParquetWriter(str(path), schema, compression="zstd", store_schema=True)
        self._waiting: list[pa.RecordBatch] = []
        self._num_rows = 0
        self._num_bytes = 0

    def write_batch(self, batch: pa.RecordBatch) -> None:
        if self._waiting and (
            self._num_rows + batch.num_rows > ROW_GROUP_ROWS
            or self._num_bytes + batch.nbytes > ROW_GROUP_BYTES
        ):
            self._flush()
        self._waiting.append(batch)
        self._num_rows += batch.num_rows
        self._num_bytes += batch.nbytes

    def _flush(self) -> None:
        if self._num_rows:
            table = pa.Table.from_batches(self._waiting, schema=self.schema)
            self._writer.write_table(table, row_group_size=self._num_rows)
        self._waiting, self._num_rows, self._num_bytes = [], 0, 0

    def close(self) -> None:
        self._flush()
        self._writer.close()
