"""Why rows cannot run, kept in columns: a million error rows are no million Python objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from batchradix.errors import RowError, RowErrorCode
from batchradix.scratch import Scratch, windows
from batchradix.types import I64

_CODES = tuple(RowErrorCode)
_NUMBERS = {code: number for number, code in enumerate(_CODES)}
_BATCH_ROWS = 1024
_ENCODING = ("utf-8", "surrogatepass")


class RowErrors(Mapping[int, RowError]):
    """The errors by row number, ascending. ``rows``: int64[m], the numbers."""

    def __init__(self, rows: I64, codes: np.ndarray, ends: I64, texts: np.ndarray) -> None:
        self.rows = rows
        self._codes, self._ends, self._texts = codes, ends, texts

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        for part in windows(len(self)):
            yield from self.rows[part].tolist()

    def __getitem__(self, row: int) -> RowError:
        place = int(np.searchsorted(self.rows, row))
        if place == len(self) or self.rows[place] != row:
            raise KeyError(row)
        return self._at(place)

    def _at(self, place: int) -> RowError:
        begin = int(self._ends[place - 1]) if place else 0
        text = self._texts[begin : int(self._ends[place])].tobytes().decode(*_ENCODING)
        return RowError(_CODES[self._codes[place]], text)

    def by_code(self) -> dict[RowErrorCode, tuple[int, str]]:
        """How many rows have each code, and the sentence of the first."""
        counts = np.bincount(self._codes, minlength=len(_CODES)).tolist()
        return {
            code: (count, self._at(int(np.argmax(self._codes == number))).message)
            for number, (code, count) in enumerate(zip(_CODES, counts, strict=True))
            if count
        }


class RowErrorWriter:
    """Gathers errors, row numbers ascending, in ``scratch``."""

    def __init__(self, scratch: Scratch) -> None:
        self._columns = [scratch.column(kind) for kind in (np.int64, np.uint8, np.int64, np.uint8)]
        self._num_bytes = 0
        self._forget()

    def add(self, row: int, error: RowError) -> None:
        text = error.message.encode(*_ENCODING)
        self._num_bytes += len(text)
        self._rows.append(row)
        self._codes.append(_NUMBERS[error.code])
        self._ends.append(self._num_bytes)
        self._texts += text
        if len(self._rows) >= _BATCH_ROWS:
            self._flush()

    def finish(self) -> RowErrors:
        """All of them; ends the writer."""
        self._flush()
        return RowErrors(*(column.finish() for column in self._columns))

    def _flush(self) -> None:
        texts = np.frombuffer(self._texts, dtype=np.uint8)
        for column, values in zip(
            self._columns, (self._rows, self._codes, self._ends, texts), strict=True
        ):
            column.append(np.asarray(values))
        self._forget()

    def _forget(self) -> None:
        self._rows: list[int] = []
        self._codes: list[int] = []
        self._ends: list[int] = []
        self._texts = bytearray()
