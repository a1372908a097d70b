"""Several answers to one request, brought together: one row with a list of its samples."""

from __future__ import annotations

import pyarrow as pa

from batchradix.sink.fold import PART_COLUMNS, RANK, null_where, put_column, put_totals, shown
from batchradix.types import I64, Status

SAMPLES = "samples"


class Samples:
    """A `Fold` of the answers to a request.

    A row is as bad as its worst sample and shows the first of those; ``cached_tokens`` are those of
    the first sample, ``completion_tokens`` and ``reasoning_tokens`` those of all. Values of
    truncated samples are null.
    """

    def __init__(self, starts: I64) -> None:
        self.starts = starts
        self.identity = ""

    def field(self, columns: pa.Schema) -> pa.Field:
        """The column of samples beside the result columns ``columns``."""
        fields = [columns.field(name) for name in PART_COLUMNS if name in columns.names]
        return pa.field(SAMPLES, pa.list_(pa.struct(fields)))

    def fold(self, batch: pa.RecordBatch, offsets: I64, first: int) -> pa.RecordBatch:
        """As `Fold.fold`."""
        out, _, ranks = shown(batch, offsets)
        out = put_totals(out, batch, offsets, ["completion_tokens", "reasoning_tokens"])
        cached = batch.column("cached_tokens").to_numpy()[offsets[:-1]]
        out = put_column(out, "cached_tokens", pa.array(cached))
        field = self.field(batch.schema)
        parts = []
        for part in field.type.value_type:
            array = batch.column(part.name)
            if part.name == "value":
                array = null_where(array, ranks == RANK[Status.TRUNCATED.value])
            parts.append(array)
        items = pa.StructArray.from_arrays(parts, fields=list(field.type.value_type))
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, type=field.type)
        return out.append_column(field, lists)
