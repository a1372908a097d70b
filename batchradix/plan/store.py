"""Token tables and plans on disk, written in windows and read through memory maps.

A stored table is a folder with ``values.u32`` (every token, little-endian uint32),
``offsets.i64`` (row boundaries, little-endian int64, beginning with 0) and ``table.json``
(counts and CRC-32 of both). A stored plan is ``order.i64``, ``lcp.i32`` and ``plan.json``.
The JSON file is written last: a folder without it was never finished.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from batchradix.errors import RunError
from batchradix.scratch import windows
from batchradix.types import Plan, TokenTable

_VERSION = 1
_CHECK_BYTES = 1 << 22
_WRITE_TOKENS = 1 << 22
_TABLE_PARTS = {"values.u32": "<u4", "offsets.i64": "<i8"}
_PLAN_PARTS = {"order.i64": "<i8", "lcp.i32": "<i4"}


class TokenTableWriter:
    """Gathers token tables into one; on disk in bounded memory, or in memory without a folder.

    Use as a context manager, or call `close` when giving up before `finish`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """``folder`` is made when missing; a table already there is replaced at `finish`."""
        self._folder = folder
        self._num_tokens = 0
        self._tables: list[TokenTable] = []
        self._files: _PartFiles | None = None
        if folder is not None:
            self._files = _PartFiles(folder, _TABLE_PARTS, "table.json")
            self._files.write("offsets.i64", np.zeros(1, dtype=np.int64))

    def append(self, table: TokenTable) -> None:
        """Adds the rows of ``table`` after those there. Raises `RunError` when a write fails."""
        if self._files is None:
            self._tables.append(table)
            return
        for begin in range(0, table.num_tokens, _WRITE_TOKENS):
            stop = min(begin + _WRITE_TOKENS, table.num_tokens)
            self._files.write("values.u32", table.values[begin:stop])
        self._files.write("offsets.i64", table.offsets[1:] + self._num_tokens)
        self._num_tokens += table.num_tokens

    def finish(self) -> TokenTable:
        """The whole table, memory-mapped read-only where it is on disk; ends the writer."""
        if self._folder is not None and self._files is not None:
            self._files.commit()
            return read_table(self._folder)
        tables, self._tables = self._tables, []
        lengths = [table.lengths for table in tables]
        offsets = np.zeros(sum(len(part) for part in lengths) + 1, dtype=np.int64)
        np.cumsum(np.concatenate([offsets[:0], *lengths]), out=offsets[1:])
        parts = [table.values[: table.num_tokens] for table in tables]
        return TokenTable(np.concatenate([np.zeros(0, dtype=np.uint32), *parts]), offsets)

    def close(self) -> None:
        """Closes files without committing them; idempotent, harmless after `finish`."""
        if self._files is not None:
            self._files.close()
        self._tables = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_table(folder: Path, table: TokenTable) -> None:
    """Stores a table in ``folder``. Raises `RunError` when it cannot be written."""
    with TokenTableWriter(folder) as writer:
        writer.append(table)
        writer.finish()


def read_table(folder: Path) -> TokenTable:
    """The table stored in ``folder``, memory-mapped. Raises `RunError` when it is damaged."""
    parts = _read_parts(folder, _TABLE_PARTS, "table.json")
    values, offsets = parts["values.u32"], parts["offsets.i64"]
    whole = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(values)
    falls = (np.diff(offsets[p.start : p.stop + 1]) < 0 for p in windows(len(offsets)))
    if not whole or any(part.any() for part in falls):
        raise _damaged(folder / "offsets.i64", "its row boundaries do not fit its tokens")
    return TokenTable(values, offsets)


def write_plan(folder: Path, plan: Plan) -> None:
    """Stores a plan in ``folder``. Raises `RunError` when it cannot be written."""
    files = _PartFiles(folder, _PLAN_PARTS, "plan.json")
    try:
        files.write("order.i64", plan.order)
        files.write("lcp.i32", plan.lcp)
        files.commit()
    finally:
        files.close()


def read_plan(folder: Path) -> Plan:
    """The plan stored in ``folder``, memory-mapped. Raises `RunError` when it is damaged."""
    parts = _read_parts(folder, _PLAN_PARTS, "plan.json")
    order, lcp = parts["order.i64"], parts["lcp.i32"]
    if len(order) != len(lcp):
        raise _damaged(folder / "lcp.i32", f"it has {len(lcp)} rows and order.i64 {len(order)}")
    return Plan(order=order, lcp=lcp)


class _PartFiles:
    """Raw files of a folder, written side by side and made valid together by a JSON file."""

    def __init__(self, folder: Path, parts: dict[str, str], index_name: str) -> None:
        self._folder = folder
        self._parts = parts
        self._index = folder / index_name
        self._counts = dict.fromkeys(parts, 0)
        self._checks = dict.fromkeys(parts, 0)
        self._open: dict[str, BinaryIO] = {}
        with self._failures():
            folder.mkdir(parents=True, exist_ok=True)
            self._index.unlink(missing_ok=True)
            for name in parts:
                path = folder / name
                path.unlink(missing_ok=True)  # maps of an older file keep their own inode
                self._open[name] = path.open("wb")

    def write(self, name: str, array: np.ndarray[Any, Any]) -> None:
        data = np.ascontiguousarray(array, dtype=self._parts[name])
        view = data.data.cast("B") if len(data) else b""
        with self._failures():
            self._open[name].write(view)
        self._counts[name] += len(data)
        self._checks[name] = zlib.crc32(view, self._checks[name])

    def commit(self) -> None:
        entries = {
            name: {"count": self._counts[name], "crc32": self._checks[name]} for name in self._parts
        }
        with self._failures():
            for file in self._open.values():
                file.flush()
                os.fsync(file.fileno())
            self.close()
            pending = self._index.with_suffix(".pending")
            pending.write_text(json.dumps({"version": _VERSION, "parts": entries}), "utf-8")
            pending.replace(self._index)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._open, files = {}, list(self._open.values())
            for file in files:
                _close_quietly(file)
            raise RunError(
                f"cannot write {self._folder}: {error.strerror or error}; free some space or "
                f"choose another folder"
            ) from error


def _close_quietly(file: BinaryIO) -> None:
    try:
        file.close()  # flushes, and so may meet the same full disk again
    except OSError:
        return


def _read_parts(
    folder: Path, parts: dict[str, str], index_name: str
) -> dict[str, np.ndarray[Any, Any]]:
    index = folder / index_name
    try:
        described = json.loads(index.read_text("utf-8"))
        version = described["version"]
        entries = {
            n: (int(described["parts"][n]["count"]), int(described["parts"][n]["crc32"]))
            for n in parts
        }
    except FileNotFoundError:
        raise _damaged(index, "it is missing, so the folder was never finished") from None
    except (OSError, ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise _damaged(index, f"it cannot be read ({error})") from error
    if version != _VERSION:
        raise _damaged(index, f"it has version {version!r}, this release reads {_VERSION}")
    return {n: _map_part(folder / n, kind, *entries[n]) for n, kind in parts.items()}


def _map_part(path: Path, kind: str, count: int, check: int) -> np.ndarray[Any, Any]:
    dtype = np.dtype(kind)
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise _damaged(path, f"it has {size} bytes instead of {count * dtype.itemsize}")
        if count == 0:  # an empty file cannot be mapped
            return np.zeros(0, dtype=dtype)
        found = 0
        with path.open("rb") as file:  # not through the map, whose pages would stay in memory
            while data := file.read(_CHECK_BYTES):
                found = zlib.crc32(data, found)
        array = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error.strerror or error})") from error
    if found != check:
        raise _damaged(path, "its contents changed since it was written")
    return array


def _damaged(path: Path, what: str) -> RunError:
    return RunError(f"{path} is damaged: {what}; delete {path.parent} and plan again")
