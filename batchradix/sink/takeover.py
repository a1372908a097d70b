"""Committed results of one job taken over by another, where that changes none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchradix.errors import SinkError
from batchradix.sink.columns import CONTENT_KEY
from batchradix.sink.folder import RunFolder, adopt, fingerprint_digest, read_fingerprint
from batchradix.sink.shards import (
    Committed,
    load_shard,
    next_shard_number,
    read_committed,
    write_shard,
)
from batchradix.types import I64

_COPIED_ROWS = 1024  # of one shard


def read_former(folder: RunFolder) -> Committed:
    """The committed results of the job that the folder holds now, whichever that is.

    Raises `SinkError` when they cannot be read.
    """
    former = read_fingerprint(folder)
    assert former is not None, "there is no job to take over"
    folder.job = fingerprint_digest(former)
    return read_committed(folder)


def take_over(
    folder: RunFolder,
    fingerprint: Mapping[str, Any],
    committed: Committed,
    record_of_row: I64,
    content_keys: NDArray[np.uint8],
) -> None:
    """Makes the folder that of the job ``fingerprint``, which keeps some of its records.

    ``committed`` is from `read_former`. ``record_of_row``: int64[n], the record that answers
    each row of the new job, -1 for none; ``content_keys``: uint8[n, 16], its rows' keys. The
    records are written anew as this job's before ``run.json`` says so, and the old ones go
    last: a kill in between leaves one job or the other, whole. Raises `SinkError`.
    """
    job = fingerprint_digest(fingerprint)
    row_of_record = np.full(len(committed), -1, dtype=np.int64)
    kept = np.flatnonzero(record_of_row >= 0)
    row_of_record[record_of_row[kept]] = kept
    number = next_shard_number(folder)
    try:
        for index, path in enumerate(committed.shards):
            here = np.flatnonzero(committed.shard_of == index)
            rows = row_of_record[here]
            if not (rows >= 0).any():
                continue
            batch = load_shard(folder, path)
            batch = batch.take(pa.array(committed.positions[here][rows >= 0]))
            write_shard(folder, number, _renamed(batch, rows[rows >= 0], content_keys, job))
            number += 1
        adopt(folder, fingerprint)
        for path in committed.shards:
            path.unlink()
    except OSError as e:
        raise SinkError(
            f"the committed results in {folder.path} cannot be taken over: {e.strerror or e}"
        ) from e


def find_twins(committed: Committed, rows: I64, key_of_row: NDArray[np.uint8]) -> I64:
    """int64[len(rows)]: a committed record of each row's content key, -1 where there is none.

    ``rows``: int64, numbers of input rows; ``key_of_row``: uint8[n, 16].
    """
    have = np.ascontiguousarray(committed.content_keys).view(np.uint64).reshape(-1, 2)
    wanted = np.ascontiguousarray(key_of_row[rows]).view(np.uint64).reshape(-1, 2)
    if not len(have):
        return np.full(len(rows), -1, dtype=np.int64)
    order = np.argsort(have[:, 0], kind="stable")
    places = np.searchsorted(have[order, 0], wanted[:, 0])
    records = order[np.minimum(places, len(order) - 1)]
    return np.where((have[records] == wanted).all(axis=1), records, -1)


def copy_records(
    folder: RunFolder,
    committed: Committed,
    records: I64,
    rows: I64,
    *,
    ids: pa.ChunkedArray,
    cached_tokens: NDArray[np.int32],
) -> None:
    """Commits what ``records`` (int64[k]) say as the results of ``rows`` (int64[k]) too.

    ``ids`` and ``cached_tokens`` are those of all rows of the input. Raises `SinkError`.
    """
    number = next_shard_number(folder)
    try:
        for index, path in enumerate(committed.shards):
            here = np.flatnonzero(committed.shard_of[records] == index)
            if not len(here):
                continue
            shard = load_shard(folder, path)
            for start in range(0, len(here), _COPIED_ROWS):
                part = here[start : start + _COPIED_ROWS]
                batch = shard.take(pa.array(committed.positions[records[part]]))
                columns = {
                    "row": pa.array(rows[part]),
                    "id": ids.take(pa.array(rows[part])).combine_chunks(),
                    "cached_tokens": pa.array(cached_tokens[rows[part]]),
                }
                write_shard(folder, number, _with_columns(batch, columns))
                number += 1
    except OSError as e:
        raise SinkError(
            f"the committed results in {folder.path} cannot be added to: {e.strerror or e}"
        ) from e


def _with_columns(batch: pa.RecordBatch, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """The batch with some of its columns replaced, in the types they had."""
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else batch.column(i)
        for i, field in enumerate(batch.schema)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _renamed(
    batch: pa.RecordBatch, rows: I64, content_keys: NDArray[np.uint8], job: str
) -> pa.RecordBatch:
    """Records under the numbers and keys that their rows have now."""
    keys = np.ascontiguousarray(content_keys[rows]).tobytes()
    columns = {
        "row": pa.array(rows),
        CONTENT_KEY.name: pa.Array.from_buffers(
            CONTENT_KEY.type, len(rows), [None, pa.py_buffer(keys)]
        ),
    }
    metadata = {**(batch.schema.metadata or {}), b"batchradix.job": job}
    return _with_columns(batch, columns).replace_schema_metadata(metadata)
