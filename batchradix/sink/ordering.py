"""Rows in any order to rows in input order, with memory bounded by pieces, not by the job.

An external sort on one integer: pieces are gathered to groups of some 16 MiB, each group is
sorted by target row and appended to one uncompressed spool file, which is mapped into memory.
Then every window of the output takes its rows from the few places where they lie. Of
each row 12 bytes stay, in a scratch file. A job of one group needs no spool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchradix.scratch import Scratch
from batchradix.types import I64

GROUP_BYTES = 16 << 20
WINDOW_ROWS = 16_384
WINDOW_BYTES = 16 << 20
_SPOOL_ROWS = 256
_BATCHES_BETWEEN = 512  # between two times at which pages of the spool are let go

Piece = tuple[pa.RecordBatch, I64]
"""A batch and its rows' targets, int64[num_rows]; a row with target -1 is left out."""


def in_order(
    pieces: Iterable[Piece],
    num_rows: int,
    spool: Path | None = None,
    scratch: Scratch | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of ``pieces`` by target 0..num_rows-1, each of which occurs once.

    The batches yielded hold up to 16,384 rows or about 16 MiB; where they are cut depends on
    the rows alone, not on the pieces. ``spool`` is a file to be made and removed; without
    it everything stays in memory, as the rows' places do without ``scratch``. Raises `OSError`
    when the spool cannot be written.
    """
    store = _SortedGroups(num_rows, spool, scratch or Scratch(least_bytes=None))
    try:
        gathered: list[Piece] = []
        num_bytes = 0
        for batch, targets in pieces:
            used = np.flatnonzero(targets >= 0)
            if len(used) < batch.num_rows:
                batch, targets = batch.take(pa.array(used)), targets[used]
            if batch.num_rows:
                gathered.append((batch, targets))
                num_bytes += batch.nbytes
            if num_bytes >= GROUP_BYTES:
                store.add(gathered, spill=True)
                num_bytes = 0
        if gathered:
            store.add(gathered, spill=store.spilled)
        store.seal()
        for start, stop in store.windows():
            yield store.take(start, stop)
    finally:
        store.close()


class _SortedGroups:
    """Sorted groups cut to small batches, and where each target row lies among them."""

    def __init__(self, num_rows: int, spool: Path | None, scratch: Scratch) -> None:
        self._scratch = scratch
        self._spool = spool
        self._file: Any = None
        self._writer: Any = None
        self._opened: Any = None
        self._batches: list[pa.RecordBatch] = []
        self._num_batches = 0
        self._batch_of = scratch.zeros(num_rows, np.int32)
        self._position_of = scratch.zeros(num_rows, np.int32)
        self._row_bytes = scratch.zeros(num_rows, np.int32)

    @property
    def spilled(self) -> bool:
        return self._file is not None

    def add(self, pieces: list[Piece], *, spill: bool) -> None:
        """Sorts the pieces to one group; the list is emptied to let go of them early."""
        targets = np.concatenate([t for _, t in pieces])
        order = np.argsort(targets)
        group = pa.concat_batches([b for b, _ in pieces])
        pieces.clear()
        self._scratch.let_go()
        group = group.take(pa.array(order))
        targets = targets[order]
        places = np.arange(len(targets))
        self._batch_of[targets] = self._num_batches + places // _SPOOL_ROWS
        self._position_of[targets] = places % _SPOOL_ROWS
        self._row_bytes[targets] = _row_bytes(group)
        for start in range(0, len(targets), _SPOOL_ROWS):
            part = group.slice(start, _SPOOL_ROWS)
            self._num_batches += 1
            if spill and self._spool is not None:
                self._open(group.schema).write_batch(part)
            else:
                self._batches.append(part)

    def _open(self, schema: pa.Schema) -> Any:
        if self._writer is None:
            self._file = pa.OSFile(str(self._spool), "wb")
            self._writer = pa.ipc.new_file(self._file, schema)
        return self._writer

    def seal(self) -> None:
        """No more groups come."""
        if self._writer is not None:
            self._writer.close()
            self._file.close()

    def windows(self) -> Iterator[tuple[int, int]]:
        start, num_rows = 0, len(self._row_bytes)
        while start < num_rows:
            sums = np.cumsum(self._row_bytes[start : start + WINDOW_ROWS], dtype=np.int64)
            stop = start + max(1, int(np.searchsorted(sums, WINDOW_BYTES, side="right")))
            yield start, stop
            start = stop

    def take(self, start: int, stop: int) -> pa.RecordBatch:
        """Target rows [start, stop) in order; a copy that holds on to nothing."""
        batch_of, position_of = self._batch_of[start:stop], self._position_of[start:stop]
        order = np.argsort(batch_of, kind="stable")
        cuts = np.flatnonzero(np.diff(batch_of[order])) + 1
        batch = self._reader()
        parts = []
        for places in np.split(order, cuts):
            parts.append(batch(int(batch_of[places[0]])).take(pa.array(position_of[places])))
            if len(parts) % _BATCHES_BETWEEN == 0:
                self._scratch.let_go()
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pa.concat_batches(parts).take(pa.array(back))

    def _reader(self) -> Any:
        if not self.spilled:
            return self._batches.__getitem__
        if self._opened is None:
            assert self._spool is not None
            mapped = self._scratch.read_only(self._spool)
            self._opened = pa.ipc.open_file(pa.py_buffer(mapped))
        self._scratch.let_go()
        return self._opened.get_batch

    def close(self) -> None:
        self._batches, self._opened = [], None
        if self._spool is not None:
            self._spool.unlink(missing_ok=True)


def _row_bytes(batch: pa.RecordBatch) -> Any:
    """int32[num_rows]: about what each row takes in memory, a function of the row alone."""
    lengths = pc.fill_null(pc.binary_length(batch.column("text")), 0).to_numpy()
    # the answer's value takes about as much as its text, a short error sentence included
    return np.minimum(256 + 2 * lengths, np.iinfo(np.int32).max).astype(np.int32)
