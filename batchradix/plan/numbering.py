"""Values as small numbers."""

from __future__ import annotations

import numpy as np

from batchradix.types import I64


def numbered(values: I64) -> I64:
    """int64[n]: the values as numbers from 0 on, by first appearance."""
    _, firsts, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(firsts), dtype=np.int64)
    rank[np.argsort(firsts)] = np.arange(len(firsts))
    places: I64 = rank[inverse]
    return places
