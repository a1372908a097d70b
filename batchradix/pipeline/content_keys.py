"""Content keys: 16 bytes a row over what determines its answer beside the job's fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchradix.config import SamplingOptions
from batchradix.errors import RowError
from batchradix.scratch import Scratch, windows
from batchradix.types import I64, Thinking, TokenTable

_KEY_BYTES = 16
_LOT_ROWS = 1 << 18


class ContentKeys:
    """The keys of all rows, in input order. ``may_retry``: greedy rows may come to be sampled.

    They are made in ``scratch``.
    """

    def __init__(self, scratch: Scratch, *, may_retry: bool = False) -> None:
        self._may_retry = may_retry
        self._scratch = scratch
        self._base_column = scratch.column(np.uint8, _KEY_BYTES)
        self._draws_column = scratch.column(np.bool_)
        self._any_draws = False

    def tail(
        self,
        options: SamplingOptions,
        max_tokens: int,
        answers: str,
        thinking: Thinking | None = None,
    ) -> bytes:
        """What a row's key holds beside its tokens; ``answers`` names a format of its own, "" for
        the run's."""
        sampled = options.temperature > 0
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
        before = "" if thinking is None else repr(thinking)
        return f"{settings!r}{before}{answers}".encode()

    def append(self, tokens: TokenTable, tails: Sequence[bytes], draws: NDArray[np.bool_]) -> None:
        """The keys of a batch. ``tails``: what each holds beside its tokens (`tail`, `error_tail`);
        ``draws``: bool[n], whether equal rows draw differently."""
        data = np.ascontiguousarray(tokens.values).tobytes()
        ends = (tokens.offsets * tokens.values.itemsize).tolist()
        keys = b"".join(
            blake2b(data[begin:end] + tail, digest_size=_KEY_BYTES).digest()
            for (begin, end), tail in zip(pairwise(ends), tails, strict=True)
        )
        self._base_column.append(np.frombuffer(keys, dtype=np.uint8))
        self._draws_column.append(draws)
        self._any_draws |= bool(draws.any())

    def finish(self) -> RowKeys:
        """The keys of the rows added; ends them."""
        base, draws = self._base_column.finish(), self._draws_column.finish()
        if not self._any_draws:
            return RowKeys(base, base, self._scratch.zeros(len(base), np.int64))
        occurrence = _occurrences(base, draws, self._scratch)
        keys = self._scratch.kept(base)
        for part in windows(len(keys)):
            # The occurrence goes into the last eight bytes; zero leaves them as they are.
            mixed = occurrence[part].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            keys[part, 8:] ^= mixed.view(np.uint8).reshape(-1, 8)
        return RowKeys(base, keys, occurrence)


def error_tail(error: RowError) -> bytes:
    """What the key of a row is made of that cannot run."""
    return f"error {error.code} {error.message}".encode(errors="replace")


@dataclass(frozen=True, slots=True)
class RowKeys:
    """``base``: uint8[n, 16], equal for rows of equal prompt and settings. ``keys``: uint8[n, 16],
    equal for rows whose answers must be equal. ``occurrence``: int64[n], how many earlier rows of
    the base key draw, 0 for rows that do not."""

    base: NDArray[np.uint8]
    keys: NDArray[np.uint8]
    occurrence: I64


def _occurrences(keys: NDArray[np.uint8], draws: NDArray[np.bool_], scratch: Scratch) -> I64:
    """int64[n]: how many earlier rows have the same key, 0 for rows that do not draw.

    Keys are hashes, so their first bits part the rows into lots of about one size.
    """
    occurrence = scratch.zeros(len(keys), np.int64)
    bits = min(8, max(0, (len(keys) // _LOT_ROWS).bit_length()))
    for lot in range(1 << bits):
        rows = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [
                part.start
                + np.flatnonzero(
                    draws[part] & (keys[part, 0].astype(np.int64) >> (8 - bits) == lot)
                )
                for part in windows(len(keys))
            ]
        )
        occurrence[rows] = _counted(keys[rows])
    return occurrence


def _counted(keys: NDArray[np.uint8]) -> I64:
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
