"""How many rows have an id that an earlier row has, at a few bytes a row."""

from __future__ import annotations

from array import array

import numpy as np

from batchradix.scratch import Scratch, windows

MAX_COUNTED_IDS = 4_000_000
_BATCH = 1 << 14


class IdCount:
    """Counts ids given as text; gives up beyond ``most`` of them.

    Hashes instead of ids: 64 bits each, and a clash among millions is next to impossible.
    """

    def __init__(self, most: int = MAX_COUNTED_IDS) -> None:
        self._most = most
        self._num_ids = 0
        self._batch = array("q")
        self._hashes = Scratch().column(np.int64)

    def add(self, text: str) -> None:
        self._num_ids += 1
        if self._num_ids > self._most:
            return
        self._batch.append(hash(text))
        if len(self._batch) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        self._hashes.append(np.frombuffer(self._batch, dtype=np.int64))
        self._batch = array("q")

    def duplicates(self) -> int | None:
        """Ids that were there before, None when there were too many ids; ends the count."""
        if self._num_ids > self._most:
            return None
        self._flush()
        hashes = self._hashes.finish()
        hashes.sort()
        return sum(
            int((hashes[part][1:] == hashes[part][:-1]).sum())
            + int(part.start > 0 and hashes[part.start] == hashes[part.start - 1])
            for part in windows(len(hashes))
        )
