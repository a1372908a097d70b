"""Arrays of a value a row that live in temporary files, so that rows cost disk and not memory.

The files are mapped. Their pages are the kernel's to write back and take away whenever memory is
wanted, and `Scratch.let_go` gives them up at once. They have no name, so that a killed process
leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from batchradix.errors import RunError

WINDOW_ROWS = 1 << 17
_LEAST_BYTES = 1 << 20
_ARROW_ROWS = 1 << 16


def windows(num_rows: int, size: int = WINDOW_ROWS) -> Iterator[slice]:
    """``[0, num_rows)`` in slices of at most ``size`` rows, so that what is computed of a slice
    fits a small memory."""
    for begin in range(0, num_rows, size):
        yield slice(begin, min(begin + size, num_rows))


class Scratch:
    """Makes arrays in files of ``folder`` (the temporary folder when None).

    Arrays of fewer than ``least_bytes`` stay in memory, all of them where ``least_bytes`` is None.
    An array's file lives as long as the array. Raises `RunError` when the disk is full.
    """

    def __init__(
        self, folder: Path | None = None, *, least_bytes: int | None = _LEAST_BYTES
    ) -> None:
        self._folder = folder
        self._least_bytes = least_bytes
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of zeros that can be written."""
        kind = np.dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if self._least_bytes is None or num_bytes < max(1, self._least_bytes):
            return np.zeros(shape, dtype=kind)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # A hole that cannot be filled later would kill the process instead of raising.
                _reserve(file.fileno(), num_bytes)
                mapped: NDArray[Any] = self._map(file.fileno(), num_bytes, kind).reshape(shape)
                return mapped
        except OSError as error:
            raise self._unwritable(error) from error

    def full(self, num_rows: int, value: int, dtype: DTypeLike) -> NDArray[Any]:
        """An array of ``num_rows`` times ``value`` that can be written."""
        array = self.zeros(num_rows, dtype)
        for part in self.windows(num_rows):
            array[part] = value
        return array

    def kept(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy of ``array`` that is to stay."""
        copy = self.zeros(array.shape, array.dtype)
        copy[...] = array
        return copy

    def column(self, dtype: DTypeLike, width: int | None = None) -> ScratchColumn:
        """An array that grows at its end, of ``width`` values a row (None: one)."""
        return ScratchColumn(self, np.dtype(dtype), width)

    def where(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """int64: where ``mask`` is true, ascending."""
        found = self.zeros(int(np.count_nonzero(mask)), np.int64)
        filled = 0
        for part in windows(len(mask)):
            here = np.flatnonzero(mask[part]) + part.start
            found[filled : filled + len(here)] = here
            filled += len(here)
        return found

    def arrow_column(self, kind: pa.DataType) -> ArrowColumn:
        """An Arrow array that grows at its end."""
        return ArrowColumn(self, kind)

    def watch(self, array: NDArray[Any]) -> None:
        """Has `let_go` also let go of an array that was mapped elsewhere."""
        base: Any = array
        while base is not None and not isinstance(base, mmap.mmap):
            base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
        if base is not None:
            self._maps.add(base)

    def read_only(self, path: Path) -> NDArray[np.uint8]:
        """The bytes of a file that is not empty, mapped; the file may be removed meanwhile."""
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps.add(mapped)
        return np.frombuffer(mapped, dtype=np.uint8)

    def let_go(self) -> None:
        """Takes the pages of all arrays out of this process's memory; they come back when used."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in list(self._maps):
                mapped.madvise(mmap.MADV_DONTNEED)

    def windows(self, num_rows: int, size: int = WINDOW_ROWS) -> Iterator[slice]:
        """As `windows`, letting go of what was read and written of each before the next."""
        for part in windows(num_rows, size):
            yield part
            self.let_go()

    def _open(self) -> Any:
        return tempfile.TemporaryFile(dir=self._folder)

    def _map(self, descriptor: int, num_bytes: int, kind: np.dtype[Any]) -> NDArray[Any]:
        mapped = mmap.mmap(descriptor, num_bytes)
        self._maps.add(mapped)
        return np.frombuffer(mapped, dtype=kind)

    def _unwritable(self, error: OSError) -> RunError:
        place = self._folder or Path(tempfile.gettempdir())
        return RunError(
            f"cannot write temporary files to {place}: {error.strerror or error}; free some space "
            f"or set TMPDIR to another folder"
        )


class ScratchColumn:
    """A growing array; see `Scratch.column`."""

    def __init__(self, scratch: Scratch, kind: np.dtype[Any], width: int | None) -> None:
        self._scratch = scratch
        self._kind = kind
        self._width = width
        self._file: Any = None
        self._parts: list[NDArray[Any]] = []
        self._part_bytes = 0
        self._num_bytes = 0

    def append(self, values: NDArray[Any]) -> None:
        """Adds values behind those there. Raises `RunError` when the disk is full."""
        part = np.array(values, dtype=self._kind)
        self._parts.append(part)
        self._part_bytes += part.nbytes
        self._num_bytes += part.nbytes
        least = self._scratch._least_bytes
        if least is not None and self._part_bytes >= max(1, least):
            self._write()

    def finish(self) -> NDArray[Any]:
        """The whole array; ends the column."""
        if self._file is None:
            flat = np.concatenate([np.zeros(0, self._kind), *(p.reshape(-1) for p in self._parts)])
            self._parts = []
        else:
            self._write()
            try:
                self._file.flush()
                flat = self._scratch._map(self._file.fileno(), self._num_bytes, self._kind)
            except OSError as error:
                raise self._scratch._unwritable(error) from error
            finally:
                self._file.close()
        whole: NDArray[Any] = flat if self._width is None else flat.reshape(-1, self._width)
        return whole

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = self._scratch._open()
            for part in self._parts:
                self._file.write(part.data.cast("B") if part.size else b"")
        except OSError as error:
            raise self._scratch._unwritable(error) from error
        self._parts, self._part_bytes = [], 0


class ArrowColumn:
    """A growing Arrow array; see `Scratch.arrow_column`."""

    def __init__(self, scratch: Scratch, kind: pa.DataType) -> None:
        self._scratch = scratch
        self._schema = pa.schema([("column", kind)])
        self._file: Any = None
        self._writer: Any = None
        self._parts: list[pa.Array] = []
        self._num_rows = 0

    def append(self, values: pa.Array) -> None:
        """Adds values behind those there. Raises `RunError` when the disk is full."""
        self._parts.append(values)
        self._num_rows += len(values)
        if self._num_rows >= _ARROW_ROWS and self._scratch._least_bytes is not None:
            self._write()

    def finish(self) -> pa.ChunkedArray:
        """The whole array; ends the column."""
        if self._file is None:
            return pa.chunked_array(self._parts, type=self._schema.field(0).type)
        self._write()
        try:
            self._writer.close()
            self._file.flush()
            mapped = self._scratch._map(self._file.fileno(), self._file.tell(), np.dtype(np.uint8))
        except OSError as error:
            raise self._scratch._unwritable(error) from error
        finally:
            self._file.close()
        return pa.ipc.open_stream(pa.py_buffer(mapped)).read_all().column(0)

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = self._scratch._open()
                self._writer = pa.ipc.new_stream(self._file, self._schema)
            column = pa.concat_arrays([*self._parts, pa.array([], self._schema.field(0).type)])
            self._writer.write_batch(pa.record_batch([column], schema=self._schema))
        except OSError as error:
            raise self._scratch._unwritable(error) from error
        self._parts, self._num_rows = [], 0


def _reserve(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.ftruncate(descriptor, num_bytes)
