"""From committed shards to the finished file: one row for every input row, in input order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchradix.errors import InputError, SinkError
from batchradix.scratch import Scratch
from batchradix.sink.columns import arrange
from batchradix.sink.durable import publish
from batchradix.sink.folder import RunFolder, is_finished, mark_finished
from batchradix.sink.formats import open_writer, output_format
from batchradix.sink.ordering import Piece, in_order
from batchradix.sink.samples import fold_samples
from batchradix.sink.shards import (
    Committed,
    load_shard,
    match_rows,
    read_committed,
    remove_partials,
)
from batchradix.types import I64

__all__ = ["finalise", "is_finished"]

KEPT_BYTES = 32 << 20
_KEPT_MIN_ROWS = 64


def finalise(
    folder: RunFolder,
    output_path: str | os.PathLike[str],
    *,
    schema: pa.Schema,
    num_rows: int,
    key_of_row: NDArray[Any] | None = None,
    keep_batches: Iterator[pa.RecordBatch] | None = None,
    unnest: bool = False,
    ids: Any = None,
    format_: str | None = None,
    starts: I64 | None = None,
    rows: I64 | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Writes the finished file from the committed shards and renames it into place last.

    ``schema`` is that of `columns.result_schema`, ``unnest`` as it was there; ``output_path``
    is the path the folder was acquired for. ``key_of_row`` as in `shards.match_rows`. ``ids``
    (a ``pa.Array`` of num_rows) takes the place of the ids the shards hold, for inputs that
    were edited between runs. ``keep_batches`` gives the kept columns of all rows of the
    file in order, in batches of any size. ``rows`` (int64[m], ascending) are the input's rows that
    the file holds, all when None. ``format_`` names the format where it is not that of the
    output's extension; what failed may then go to a file of its own, ``folder.errors``.
    ``starts``: where an input row has several results, as in `samples.fold_samples`; kept columns
    are then those of its m input rows, and ``num_rows`` results become m rows. ``rows`` are
    numbers of results then, all of an input row or none.

    The file is a function of shards, schema, ids and kept columns: the same bytes each time,
    however the rows lie in the shards. Memory is bounded (see `sink.ordering`); arrays of a value
    a row are made in ``scratch`` (None: in memory). The shards
    stay, and ``run.json`` notes that the output is finished.

    Raises `SinkError` when rows are missing or answered twice differently (naming the counts)
    or the file cannot be written, and `InputError` when ``keep_batches`` has not ``num_rows``
    rows. The output is what it was before then, and what was committed stays.
    """
    scratch = scratch or Scratch(least_bytes=None)
    ordered = committed_in_order(folder, num_rows, key_of_row, rows=rows, scratch=scratch)
    num_rows = num_rows if rows is None else len(rows)
    batches = zip_columns(
        ordered,
        schema,
        keep_batches,
        num_rows=num_rows,
        unnest=unnest,
        ids=ids,
        starts=starts,
        rows=rows,
    )
    try:
        _write(folder, format_ or output_format(output_path), schema, batches)
    except (OSError, pa.ArrowException) as e:
        what = getattr(e, "strerror", None) or str(e)
        raise SinkError(
            f"the output {folder.shown} cannot be written: {what}; all {num_rows} rows are "
            f"committed and stay, run again to finish"
        ) from e
    finally:
        with contextlib.suppress(OSError):
            remove_partials(folder)
    mark_finished(folder, {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()})


def committed_in_order(
    folder: RunFolder,
    num_rows: int,
    key_of_row: NDArray[Any] | None = None,
    *,
    rows: I64 | None = None,
    scratch: Scratch,
) -> Iterator[pa.RecordBatch]:
    """The committed results of all rows, or of ``rows``, as they are in shards, in input order;
    arguments, memory and errors as in `finalise`."""
    committed = read_committed(folder, scratch=scratch)
    source = match_rows(committed, num_rows, key_of_row, scratch=scratch)
    if rows is not None:
        source, num_rows = _chosen(source, rows, scratch), len(rows)
    _verify(committed, source, by_key=key_of_row is not None)
    pieces = _pieces(folder, committed, source, scratch)
    return in_order(pieces, num_rows, folder.tmp / "spool.arrow", scratch)


def _write(
    folder: RunFolder, format_: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
) -> None:
    partial = folder.tmp / f"output{folder.output.suffix}"
    writer = open_writer(partial, format_, schema)
    try:
        for batch in batches:
            writer.write_batch(batch)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    if writer.errors is not None and folder.errors is not None:
        if writer.errors.stat().st_size:
            publish(writer.errors, folder.errors)
        else:
            folder.errors.unlink(missing_ok=True)
    publish(partial, folder.output)


def _chosen(source: I64, rows: I64, scratch: Scratch) -> I64:
    chosen: I64 = scratch.zeros(len(rows), np.int64)
    for part in scratch.windows(len(rows)):
        chosen[part] = source[rows[part]]
    return chosen


def _verify(committed: Committed, source: I64, *, by_key: bool) -> None:
    """Every row has a record; by row number alone, no two records may disagree."""
    num_missing = int((source < 0).sum())
    num_doubled = num_outside = 0
    if not by_key:
        num_rows = len(source)
        inside = (committed.rows >= 0) & (committed.rows < num_rows)
        num_outside = int((~inside).sum())
        first = source[committed.rows[inside]]
        keys = committed.content_keys
        num_doubled = int((keys[inside] != keys[first]).sum())
    if num_missing or num_doubled or num_outside:
        raise SinkError(
            f"the committed results do not make up the input's {len(source)} rows: "
            f"{num_missing} missing, {num_doubled} answered twice for different prompts, "
            f"{num_outside} beyond the input; run again, or with --restart"
        )


def _pieces(
    folder: RunFolder, committed: Committed, source: I64, scratch: Scratch
) -> Iterator[Piece]:
    targets = scratch.full(len(committed), -1, np.int64)
    for part in scratch.windows(len(source)):
        targets[source[part]] = np.arange(part.start, part.stop)
    for path, records in committed.by_shard():
        if (targets[records] >= 0).any():
            yield load_shard(folder, path), np.array(targets[records])


def zip_columns(
    ordered: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    keep_batches: Iterator[pa.RecordBatch] | None,
    *,
    num_rows: int,
    unnest: bool,
    ids: Any = None,
    starts: I64 | None = None,
    rows: I64 | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches of shard columns in input order to batches of ``schema`` with kept columns, folded
    where ``starts`` says which belong together. ``rows``: int64[num_rows], the numbers of the
    results among those of the whole input, from 0 on when None.

    Raises `InputError` when ``keep_batches`` has not exactly ``num_rows`` rows.
    """
    if starts is not None:
        ids = None if ids is None else ids.take(pa.array(starts[:-1]))
        if rows is not None:
            rows, starts = _chosen_groups(starts, rows)
        ordered, num_rows = fold_samples(ordered, starts), len(starts) - 1
    kept = None if keep_batches is None else KeptColumns(keep_batches, num_rows)
    row = 0
    for window in ordered:
        start = 0
        while start < window.num_rows:
            columns = None if kept is None else kept.take(window.num_rows - start)
            part = window.slice(start, None if columns is None else columns.num_rows)
            numbers = np.arange(row + start, row + start + part.num_rows, dtype=np.int64)
            part = _numbered(part, numbers if rows is None else rows[numbers], ids)
            yield arrange(part, schema, unnest=unnest, kept=columns)
            start += part.num_rows
        row += window.num_rows
    if kept is not None:
        kept.finish()


def _chosen_groups(starts: I64, rows: I64) -> tuple[I64, I64]:
    """The input rows that the results ``rows`` are of, and where these begin among them."""
    groups = np.flatnonzero(np.isin(starts[:-1], rows))
    sizes = np.diff(starts)[groups]
    return groups, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _numbered(part: pa.RecordBatch, numbers: I64, ids: Any) -> pa.RecordBatch:
    """The rows' numbers as they are in the input now, and their ids where given."""
    columns = {"row": pa.array(numbers)}
    if ids is not None:
        these = ids.take(columns["row"])
        these = these.combine_chunks() if isinstance(these, pa.ChunkedArray) else these
        columns["id"] = these.cast(part.schema.field("id").type)
    for name, array in columns.items():
        index = part.schema.get_field_index(name)
        part = part.set_column(index, part.schema.field(index), array)
    return part


class KeptColumns:
    """Kept columns as they come from the input, handed out in bounded pieces."""

    def __init__(self, batches: Iterator[pa.RecordBatch], num_rows: int) -> None:
        self._batches = iter(batches)
        self._expected = num_rows
        self._given = 0
        self._rest: pa.RecordBatch | None = None

    def take(self, max_rows: int) -> pa.RecordBatch:
        """Up to ``max_rows`` rows and about 32 MiB, but at least one row."""
        pieces: list[pa.RecordBatch] = []
        num_rows = num_bytes = 0
        while num_rows < max_rows and num_bytes < KEPT_BYTES:
            rest = self._next()
            if rest is None:
                break
            if pieces and not rest.schema.equals(pieces[0].schema):
                break
            piece = rest.slice(0, max_rows - num_rows)
            if piece.nbytes > KEPT_BYTES and piece.num_rows > _KEPT_MIN_ROWS:
                fit = piece.num_rows * KEPT_BYTES // piece.nbytes
                piece = piece.slice(0, max(_KEPT_MIN_ROWS, fit))
            self._rest = rest.slice(piece.num_rows)
            pieces.append(piece)
            num_rows += piece.num_rows
            num_bytes += piece.nbytes
        self._given += num_rows
        if not pieces:
            self._refuse(self._given)
        return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)

    def finish(self) -> None:
        extra = 0
        while (rest := self._next()) is not None:
            extra += rest.num_rows
            self._rest = None
        if extra:
            self._refuse(self._given + extra)

    def _refuse(self, found: int) -> None:
        raise InputError(
            f"the input has {found} rows now and had {self._expected} when it was read first; "
            f"it changed during the run, so kept columns cannot be told apart"
        )

    def _next(self) -> pa.RecordBatch | None:
        while self._rest is None or not self._rest.num_rows:
            try:
                self._rest = next(self._batches, None)
            except OSError as e:
                raise InputError(f"the input cannot be read again: {e}") from e
            if self._rest is None:
                return None
        return self._rest
