"""Committed shards: what makes results survive a kill, and how they are found again.

A shard is one Arrow IPC file ``shards/shard-NNNNNN-CCCCCCCC.arrow`` with one record batch:
a running number and the CRC-32 of the file's bytes. It appears by rename after its bytes are
on the disk, so it is whole or absent; what a failing disk or a hand breaks later is found by
the checksum. Shards stand in completion order, their rows too.

Of several records of one row with one content key the first counts (lowest shard number, then
position); `match_rows` is the only place that decides this.
"""

from __future__ import annotations

import contextlib
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchradix.errors import SinkError
from batchradix.scratch import Scratch, windows
from batchradix.sink.columns import CONTENT_KEY, EncodeValues, results_to_batch
from batchradix.sink.durable import write_durably
from batchradix.sink.folder import RunFolder, acquire, check_fingerprint, check_output
from batchradix.types import I32, I64, Result, Status

__all__ = [
    "Committed",
    "RunFolder",
    "ShardWriter",
    "acquire",
    "check_fingerprint",
    "check_output",
    "forget_rows",
    "load_shard",
    "match_rows",
    "read_committed",
    "remove_partials",
]

COMMIT_ROWS = 256
COMMIT_BYTES = 8 << 20
COMMIT_SECONDS = 5.0

_NAME = re.compile(r"shard-(\d{6,})-([0-9a-f]{8})\.arrow")
_JOB = b"batchradix.job"
_RESUME_COLUMNS = ("row", "status", CONTENT_KEY.name)
_STATUS_CODES = {status.value: code for code, status in enumerate(Status)}
# Rows and records that are matched at once where they have moved.
_LOT_ROWS = 1 << 18


class ShardWriter:
    """Takes results in any order and commits them in shards.

    A commit happens at 256 rows, at about 8 MiB, 5 s after the first uncommitted row, or on
    `commit`; what was committed survives any end of the process. ``schema`` is that of
    `columns.shard_schema`, ``encode_values`` as in `columns.results_to_batch`, ``clock``
    counts seconds. The folder's fingerprint has been checked.
    """

    def __init__(
        self,
        folder: RunFolder,
        schema: pa.Schema,
        encode_values: EncodeValues | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert folder.job is not None, "check_fingerprint comes first"
        self._folder = folder
        self._schema = schema.with_metadata({_JOB: folder.job.encode()})
        self._encode_values = encode_values
        self._clock = clock
        self._next = next_shard_number(folder)
        self._waiting: list[Result] = []
        self._waiting_bytes = 0
        self._first_at = 0.0
        self.num_committed = 0
        """Rows this writer has committed."""

    @property
    def num_waiting(self) -> int:
        """Rows taken but not committed yet."""
        return len(self._waiting)

    def append(self, result: Result) -> None:
        """Takes one result; commits when it is time to. Raises `SinkError` as `commit`."""
        if not self._waiting:
            self._first_at = self._clock()
        self._waiting.append(result)
        # the value is about as long as the text it was parsed from
        self._waiting_bytes += 128 + 2 * len(result.text or "")
        if len(self._waiting) >= COMMIT_ROWS or self._waiting_bytes >= COMMIT_BYTES:
            self.commit()
        else:
            self.commit_if_due()

    def commit_if_due(self) -> None:
        """Commits when the oldest uncommitted row is 5 s old. Raises `SinkError`."""
        if self._waiting and self._clock() - self._first_at >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Commits every row taken so far.

        Raises `SinkError` when the disk is full or the folder is gone: the rows still wait, so
        a later `commit` may succeed, and what was committed before stays.
        """
        if not self._waiting:
            return
        try:
            batch = results_to_batch(self._waiting, self._schema, self._encode_values)
            write_shard(self._folder, self._next, batch)
        except OSError as e:
            raise SinkError(
                f"results cannot be written to {self._folder.shards}: {e.strerror or e}; "
                f"{self.num_committed} rows of this run are committed and stay, "
                f"{len(self._waiting)} are not; mend this and run again to continue"
            ) from e
        self._next += 1
        self.num_committed += len(self._waiting)
        self._waiting, self._waiting_bytes = [], 0


def next_shard_number(folder: RunFolder) -> int:
    """A number that no shard of the folder has had."""
    names = [p.name for place in (folder.shards, folder.bad) for p in place.glob("shard-*")]
    return max((int(m[1]) for n in names if (m := _NAME.match(n))), default=-1) + 1


def write_shard(folder: RunFolder, number: int, batch: pa.RecordBatch) -> None:
    """Commits one batch as the shard of that number. Raises `OSError`."""
    stream = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(stream, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    data = memoryview(stream.getvalue())
    name = f"shard-{number:06d}-{zlib.crc32(data):08x}.arrow"
    write_durably(data, folder.tmp / f"shard-{number:06d}.partial", folder.shards / name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What the committed shards hold, without texts and values; arrays by record.

    ``rows``: int64[n], input row numbers. ``content_keys``: V16[n]. ``statuses``: uint8[n],
    positions in ``tuple(Status)``. Record ``i`` is row ``positions[i]`` (int32[n]) of the
    file ``shards[shard_of[i]]`` (int32[n]). Records stand in order of commit. ``warnings``
    are sentences about shards that were set aside.
    """

    shards: tuple[Path, ...]
    shard_of: I32
    positions: I32
    rows: I64
    content_keys: NDArray[np.void]
    statuses: NDArray[np.uint8]
    warnings: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def has_status(self, status: Status) -> NDArray[np.bool_]:
        """bool[n]: which records have that status."""
        marked: NDArray[np.bool_] = self.statuses == _STATUS_CODES[status.value]
        return marked

    def by_shard(self) -> Iterator[tuple[Path, slice]]:
        """Each shard's file and its records."""
        starts = np.searchsorted(self.shard_of, np.arange(len(self.shards) + 1))
        for path, start, stop in zip(self.shards, starts[:-1], starts[1:], strict=True):
            yield path, slice(int(start), int(stop))


def read_committed(
    folder: RunFolder, schema: pa.Schema | None = None, *, scratch: Scratch | None = None
) -> Committed:
    """Reads which rows are committed, and cleans up after a killed run.

    Half-written files in ``tmp/`` are removed. A shard that is torn, damaged, of another job
    or (where ``schema`` is given) of another schema is moved to ``bad/`` and named in
    ``warnings``; its rows are not committed. The arrays are made in ``scratch`` (None: in
    memory). Raises `SinkError` when the folder cannot be read at all.
    """
    scratch = scratch or Scratch(least_bytes=None)
    shard_of, positions = scratch.column(np.int32), scratch.column(np.int32)
    rows, statuses = scratch.column(np.int64), scratch.column(np.uint8)
    keys = scratch.column(np.uint8, CONTENT_KEY.type.byte_width)
    paths: list[Path] = []
    warnings: list[str] = []
    try:
        remove_partials(folder)
        for path in _shard_paths(folder):
            batch, fault = _read_shard(path, folder.job, schema, columns=_RESUME_COLUMNS)
            if batch is None:
                warnings.append(_set_aside(folder, path, fault))
            else:
                count = batch.num_rows
                shard_of.append(np.full(count, len(paths), dtype=np.int32))
                positions.append(np.arange(count, dtype=np.int32))
                rows.append(batch.column("row").to_numpy())
                statuses.append(
                    np.array(
                        [_STATUS_CODES[s] for s in batch.column("status").to_pylist()], np.uint8
                    )
                )
                keys.append(_fixed_bytes(batch.column(CONTENT_KEY.name)).view(np.uint8))
                paths.append(path)
    except OSError as e:
        raise SinkError(
            f"the committed results in {folder.path} cannot be read: {e.strerror or e}"
        ) from e
    return Committed(
        shards=tuple(paths),
        shard_of=shard_of.finish(),
        positions=positions.finish(),
        rows=rows.finish(),
        content_keys=keys.finish().reshape(-1).view("V16"),
        statuses=statuses.finish(),
        warnings=tuple(warnings),
    )


def match_rows(
    committed: Committed,
    num_rows: int,
    key_of_row: NDArray[Any] | None = None,
    *,
    scratch: Scratch | None = None,
) -> I64:
    """For every input row the committed record that answers it: int64[num_rows], -1 for none.

    Without ``key_of_row`` records count by row number. With it (16 bytes a row: V16, S16 or
    uint8[num_rows, 16]) a record counts only for a row of its content key: first for the row
    of its own number, then, should the input have been edited, for other rows of that key in
    order; a record answers one row at most. The array is made in ``scratch`` (None: in memory).
    """
    scratch = scratch or Scratch(least_bytes=None)
    source: I64 = scratch.full(num_rows, -1, np.int64)
    wanted = None if key_of_row is None else _as_s16(key_of_row)
    have = _as_s16(committed.content_keys)
    for part in reversed(list(windows(len(committed)))):
        rows = committed.rows[part]
        inside = np.flatnonzero((rows >= 0) & (rows < num_rows))
        if wanted is not None:
            inside = inside[wanted[rows[inside]] == have[part][inside]]
        # numpy keeps the last of repeated assignments, so the first record is assigned last
        source[rows[inside][::-1]] = part.start + inside[::-1]
        scratch.let_go()
    if wanted is None:
        return source
    unused = np.ones(len(committed), dtype=np.bool_)
    num_missing = 0
    for part in scratch.windows(num_rows):
        found = source[part]
        num_missing += int((found < 0).sum())
        unused[found[found >= 0]] = False
    num_spare = int(unused.sum())
    if num_missing and num_spare:
        # Keys are hashes, so their first bits part rows and records into lots of about one size.
        bits = min(8, ((num_missing + num_spare) // _LOT_ROWS).bit_length())
        for lot in range(1 << bits):
            missing = _of_lot(wanted, lambda part: source[part] < 0, lot, bits, scratch)
            spare = _of_lot(have, unused.__getitem__, lot, bits, scratch)
            _give(source, missing, wanted[missing], spare, have[spare])
    return source


def _of_lot(
    keys: NDArray[np.bytes_],
    is_left: Callable[[slice], NDArray[np.bool_]],
    lot: int,
    bits: int,
    scratch: Scratch,
) -> I64:
    """int64: those left whose keys begin with the ``bits`` bits ``lot``, ascending."""
    found = [np.zeros(0, dtype=np.int64)]
    for part in scratch.windows(len(keys)):
        begins = keys[part].view(np.uint8).reshape(-1, keys.itemsize)[:, 0].astype(np.int64)
        found.append(part.start + np.flatnonzero(is_left(part) & (begins >> (8 - bits) == lot)))
    return np.concatenate(found)


def _give(
    source: I64,
    rows: I64,
    row_keys: NDArray[np.bytes_],
    records: I64,
    record_keys: NDArray[np.bytes_],
) -> None:
    """Gives the records to rows of their key, in order."""
    _, codes = np.unique(np.concatenate([row_keys, record_keys]), return_inverse=True)
    places = codes[: len(rows)] * (len(codes) + 1) + _occurrence(codes[: len(rows)])
    offers = codes[len(rows) :] * (len(codes) + 1) + _occurrence(codes[len(rows) :])
    _, a, b = np.intersect1d(places, offers, assume_unique=True, return_indices=True)
    source[rows[a]] = records[b]


def _occurrence(codes: I64) -> I64:
    """int64: how many equal codes stand before each."""
    order = np.argsort(codes, kind="stable")
    in_order = codes[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=-1))
    lengths = np.diff(starts, append=len(codes))
    counts = np.empty(len(codes), dtype=np.int64)
    counts[order] = np.arange(len(codes)) - np.repeat(starts, lengths)
    return counts


def _as_s16(keys: NDArray[Any]) -> NDArray[np.bytes_]:
    # S16 compares like the bytes themselves here: all keys have the same length
    return np.ascontiguousarray(keys).view("S16").reshape(-1)


def load_shard(folder: RunFolder, path: Path) -> pa.RecordBatch:
    """A whole shard. Raises `SinkError` when it was damaged since `read_committed`."""
    try:
        batch, fault = _read_shard(path, folder.job, None, columns=None)
    except OSError as e:
        raise SinkError(f"the shard {path} cannot be read: {e.strerror or e}") from e
    if batch is None:
        raise SinkError(f"{_set_aside(folder, path, fault)}; run again to compute them anew")
    return batch


def forget_rows(
    folder: RunFolder,
    committed: Committed,
    forget: NDArray[np.bool_],
    *,
    scratch: Scratch | None = None,
) -> Committed:
    """Drops the records marked in ``forget`` (bool[n]), so that their rows run again.

    Each shard concerned is replaced by one without them. A kill in the middle leaves the old
    records, never fewer than were to stay. Raises `SinkError`.
    """
    number = next_shard_number(folder)
    try:
        for path, records in committed.by_shard():
            if not forget[records].any():
                continue
            stay = np.flatnonzero(~forget[records])
            if len(stay):
                batch = load_shard(folder, path).take(pa.array(stay))
                write_shard(folder, number, batch)
                number += 1
            path.unlink()
    except OSError as e:
        raise SinkError(
            f"the committed results in {folder.path} cannot be rewritten: {e.strerror or e}"
        ) from e
    return read_committed(folder, scratch=scratch)


def shard_jobs(folder: RunFolder) -> set[str]:
    """The digests of the jobs whose results the readable shards hold."""
    jobs = set()
    for path in _shard_paths(folder):
        with contextlib.suppress(OSError, pa.ArrowException):
            schema = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).schema
            jobs.add((schema.metadata or {}).get(_JOB, b"").decode())
    return jobs


def shard_batches(
    work: Path, columns: tuple[str, ...] | None, paths: Sequence[Path] | None = None
) -> Iterator[tuple[Path, pa.RecordBatch]]:
    """The readable shards of a work folder that another process may hold, in order of commit,
    with ``columns`` of them; all when None. ``paths``: only these. Nothing is changed; a shard that
    is replaced meanwhile is left out. Raises `OSError`."""
    for path in _in_order((work / "shards").iterdir()) if paths is None else paths:
        with contextlib.suppress(FileNotFoundError):
            batch, _ = _read_shard(path, None, None, columns=columns)
            if batch is not None:
                yield path, batch


def _shard_paths(folder: RunFolder) -> list[Path]:
    return _in_order(folder.shards.iterdir())


def _in_order(paths: Iterable[Path]) -> list[Path]:
    def number(path: Path) -> tuple[int, str]:
        match = _NAME.fullmatch(path.name)
        return (int(match[1]) if match else -1, path.name)

    return sorted((p for p in paths if p.is_file()), key=number)


def remove_partials(folder: RunFolder) -> None:
    """Empties ``tmp/`` of files that were being written when a run ended."""
    for path in folder.tmp.iterdir():
        if path.is_file():
            path.unlink()


def _read_shard(
    path: Path, job: str | None, schema: pa.Schema | None, *, columns: tuple[str, ...] | None
) -> tuple[pa.RecordBatch | None, str]:
    """The shard's batch (only ``columns`` of it), or None and what is wrong with it."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None, "is no shard"
    data = path.read_bytes()
    if f"{zlib.crc32(data):08x}" != match[2]:
        return None, "is torn or damaged"
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        found = reader.schema
        if job is not None and (found.metadata or {}).get(_JOB) != job.encode():
            return None, "belongs to another job"
        if not set(_RESUME_COLUMNS) <= set(found.names) or (
            schema is not None and not found.equals(schema)
        ):
            return None, "has other columns than this job"
        if columns is not None:
            options = pa.ipc.IpcReadOptions(
                included_fields=[found.get_field_index(name) for name in columns]
            )
            reader = pa.ipc.open_file(pa.py_buffer(data), options=options)
        batches = list(_record_batches(reader))
    except pa.ArrowException as e:
        return None, f"cannot be read ({e})"
    if len(batches) != 1:
        return None, f"has {len(batches)} record batches instead of one"
    return batches[0], ""


def _record_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)


def _set_aside(folder: RunFolder, path: Path, fault: str) -> str:
    folder.bad.mkdir(exist_ok=True)
    target = folder.bad / path.name
    number = 1
    while target.exists():
        target = folder.bad / f"{path.name}.{number}"
        number += 1
    path.rename(target)
    return f"{path.name} {fault}; it was moved to {target} and its rows are not committed"


def _fixed_bytes(array: pa.Array) -> NDArray[np.void]:
    """V16[n] of a fixed_size_binary(16) array without nulls."""
    buffer = array.buffers()[1]
    whole = np.frombuffer(buffer, dtype="V16", count=array.offset + len(array))
    return whole[array.offset :].copy()
