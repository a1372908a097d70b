"""Several answers to one input row, brought together: one row with a list of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchradix.types import I64, Status

SAMPLES = "samples"
_PARTS = (
    "status",
    "value",
    "text",
    "reasoning",
    "error",
    "finish_reason",
    "completion_tokens",
    "reasoning_tokens",
)
_RANK = {Status.OK.value: 0, Status.TRUNCATED.value: 1, Status.ERROR.value: 2}


def samples_field(columns: Any) -> pa.Field:
    """The column of samples beside the result columns ``columns`` (a ``pa.Schema``)."""
    fields = [columns.field(name) for name in _PARTS if name in columns.names]
    return pa.field(SAMPLES, pa.list_(pa.struct(fields)))


def fold_samples(batches: Iterator[pa.RecordBatch], starts: I64) -> Iterator[pa.RecordBatch]:
    """Batches of shard columns, a row a sample, to batches with a row an input row.

    ``starts``: int64[num_rows + 1], where each input row's samples begin. A row is as bad as its
    worst sample and shows the first of those; ``cached_tokens`` are those of the first sample,
    ``completion_tokens`` and ``reasoning_tokens`` those of all. Values of truncated samples are
    null.
    """
    group, row = 0, 0  # the first input row that is not out yet, and its first sample
    rest: pa.RecordBatch | None = None
    for batch in batches:
        whole = batch if rest is None else pa.concat_batches([rest, batch])
        end = int(np.searchsorted(starts, row + whole.num_rows, side="right")) - 1
        count = int(starts[end]) - row
        if end > group:
            yield _folded(whole.slice(0, count), starts[group : end + 1] - row)
        rest = whole.slice(count)
        group, row = end, row + count
    assert rest is None or not rest.num_rows, "an input row lacks samples"


def _folded(batch: pa.RecordBatch, offsets: I64) -> pa.RecordBatch:
    """``offsets``: int64[m + 1], where the rows of ``batch`` that belong together begin."""
    firsts = offsets[:-1]
    ranks = np.array([_RANK[status] for status in batch.column("status").to_pylist()])
    worst = np.maximum.reduceat(ranks, firsts)
    is_worst = ranks == np.repeat(worst, np.diff(offsets))
    shown = np.minimum.reduceat(np.where(is_worst, np.arange(len(ranks)), len(ranks)), firsts)
    folded = batch.take(pa.array(shown))
    counts = {"cached_tokens": batch.column("cached_tokens").to_numpy()[firsts]}
    for name in ("completion_tokens", "reasoning_tokens"):
        if name in batch.schema.names:
            counts[name] = np.add.reduceat(batch.column(name).to_numpy(), firsts)
    for name, numbers in counts.items():
        index = folded.schema.get_field_index(name)
        array = pa.array(numbers.astype(np.int32))
        folded = folded.set_column(index, folded.schema.field(index), array)
    field = samples_field(batch.schema)
    parts = [_part(batch, part.name, ranks) for part in field.type.value_type]
    items = pa.StructArray.from_arrays(parts, fields=list(field.type.value_type))
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, type=field.type)
    return folded.append_column(field, lists)


def _part(batch: pa.RecordBatch, name: str, ranks: Any) -> pa.Array:
    array = batch.column(name)
    if name != "value":
        return array
    places = pa.array(np.arange(len(array)))
    is_truncated = pa.array(ranks == _RANK[Status.TRUNCATED.value])
    return array.take(pc.if_else(is_truncated, pa.scalar(None, pa.int64()), places))
