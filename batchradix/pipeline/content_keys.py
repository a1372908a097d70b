"""Content keys: 16 bytes a row over what determines its answer beside the job's fingerprint."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from batchradix.config import SamplingOptions
from batchradix.errors import RowError
from batchradix.types import I64, U32

_KEY_BYTES = 16


class ContentKeys:
    """The keys of all rows, in input order. ``may_retry``: greedy rows may come to be sampled."""

    def __init__(self, *, may_retry: bool = False) -> None:
        self._may_retry = may_retry
        self._base = bytearray()
        self._draws = bytearray()

    def add(self, token_ids: U32, options: SamplingOptions, max_tokens: int, answers: str) -> None:
        """A row that can run; ``answers`` names a format of its own, "" for the run's."""
        sampled = options.temperature > 0
        digest = hashlib.blake2b(token_ids.tobytes(), digest_size=_KEY_BYTES)
        draw = (options.top_p, options.top_k, options.min_p, options.seed if sampled else None)
        settings = (
            max_tokens,
            options.temperature,
            draw if sampled or self._may_retry else None,
            options.repetition_penalty,
            options.presence_penalty,
            options.frequency_penalty,
            options.stop,
        )
        digest.update(repr(settings).encode())
        if answers:
            digest.update(answers.encode())
        self._base += digest.digest()
        self._draws.append(sampled and options.seed is None)

    def add_error(self, error: RowError) -> None:
        """A row that cannot run."""
        digest = hashlib.blake2b(digest_size=_KEY_BYTES)
        digest.update(f"error {error.code} {error.message}".encode(errors="replace"))
        self._base += digest.digest()
        self._draws.append(False)

    @property
    def base(self) -> NDArray[np.uint8]:
        """uint8[n, 16]: equal for rows of equal prompt and settings."""
        return np.frombuffer(bytes(self._base), dtype=np.uint8).reshape(-1, _KEY_BYTES)

    @property
    def occurrence(self) -> I64:
        """int64[n]: how many earlier rows of that key draw, 0 for rows that do not."""
        draws = np.frombuffer(bytes(self._draws), dtype=np.bool_)
        found: I64 = np.where(draws, _occurrences(self.base), 0)
        return found

    @property
    def keys(self) -> NDArray[np.uint8]:
        """uint8[n, 16]: equal for rows whose answers must be equal."""
        keys = self.base.copy()
        # The occurrence goes into the last eight bytes; zero leaves them as they are.
        mixed = self.occurrence.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        keys[:, 8:] ^= mixed.view(np.uint8).reshape(-1, 8)
        return keys


def _occurrences(keys: NDArray[np.uint8]) -> I64:
    """int64[n]: how many earlier rows have the same key."""
    n = len(keys)
    occurrence = np.zeros(n, dtype=np.int64)
    if n == 0:
        return occurrence
    halves = np.ascontiguousarray(keys).view(np.uint64).reshape(n, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable
    same = np.zeros(n, dtype=bool)
    same[1:] = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
    position = np.arange(n, dtype=np.int64)
    group_start = np.maximum.accumulate(np.where(same, 0, position))
    occurrence[order] = position - group_start
    return occurrence
