"""Which rows of a step choose among few tokens, and which tokens these are.

A row's own mask alone decides, never what stands beside it, so that the way its logits are
computed does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchradix.types import I64

MAX_CANDIDATES = 256
MIN_VOCAB_SHARE = 16  # tokens of the vocabulary a candidate, or computing all costs as little


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """``is_few``: bool[R], the rows that choose among few tokens. ``token_ids``: int64[n],
    ascending, what any of these rows may choose."""

    is_few: NDArray[np.bool_]
    token_ids: I64


def find_candidates(
    bitmask: NDArray[np.int32], masked_rows: NDArray[np.bool_], num_choices: int
) -> Candidates:
    """Looks at the masks of a step's rows.

    ``bitmask``: int32[R, ceil(vocab_size / 32)], read where ``masked_rows``: bool[R];
    ``num_choices`` tokens can be chosen at all. A mask that allows nothing is not few.
    """
    is_few = np.zeros(len(masked_rows), dtype=np.bool_)
    rows = np.flatnonzero(masked_rows)
    words = bitmask[rows, : -(-num_choices // 32)].view(np.uint32)
    words[:, -1] &= np.uint32(0xFFFFFFFF >> (-num_choices % 32))
    counts = np.bitwise_count(words).sum(axis=1)
    few = (counts > 0) & (counts <= min(MAX_CANDIDATES, num_choices // MIN_VOCAB_SHARE))
    is_few[rows[few]] = True
    union = np.bitwise_or.reduce(words[few], axis=0, initial=np.uint32(0))
    octets = union.astype("<u4", copy=False).view(np.uint8)
    return Candidates(
        is_few=is_few,
        token_ids=np.flatnonzero(np.unpackbits(octets, bitorder="little")).astype(np.int64),
    )
