"""Which slots of a step's pieces lie in the sliding windows of their queries.

A query with a window of ``w`` tokens sees, of the slots of its pieces in order of position, the
last ``w``, its own included. Only numpy: this runs once a step, on the host.

Legend: T queries, n pieces. A table of pieces is int64[n, 5] of (slot_start, num_slots,
query_start, query_end, limit): query ``query_start + i`` sees the first ``limit + i`` slots, or
all. The pieces of a query stand in order of position and hold all of its positions, from the first
token on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Windowed", "piece_table", "positions_of", "runs_of", "windowed"]

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Windowed:
    """``pieces``: a table of them, each with the queries alone that see something of it; ``rows``:
    which rows of the table given they are parts of; ``starts``: the positions of their first slots,
    int64[n]; ``first_seen``: the first position that each query sees, int64[T], perhaps negative.
    """

    pieces: I64
    rows: I64
    starts: I64
    first_seen: I64


def piece_table(context: I64, causal: I64) -> I64:
    """Pieces as in `tree_attention_reference` as a table; a causal one may have more slots than
    queries, of which the last sees all."""
    table = np.empty((len(context) + len(causal), 5), dtype=np.int64)
    table[: len(context), :4] = context
    table[len(context) :, :4] = causal
    table[:, 4] = table[:, 1]
    table[len(context) :, 4] -= table[len(context) :, 3] - table[len(context) :, 2] - 1
    return table


def positions_of(pieces: I64, num_queries: int) -> tuple[I64, I64]:
    """The position of each piece's first slot, int64[n], and of each query, int64[T]."""
    seen = np.zeros(num_queries, dtype=np.int64)
    starts = np.empty(len(pieces), dtype=np.int64)
    for index, (_, num_slots, query_start, query_end, limit) in enumerate(pieces.tolist()):
        starts[index] = seen[query_start]
        if limit >= num_slots:
            seen[query_start:query_end] += num_slots
        else:
            limits = np.arange(limit, limit + query_end - query_start)
            seen[query_start:query_end] += np.minimum(limits, num_slots)
    return starts, seen - 1


def windowed(pieces: I64, num_queries: int, window: int) -> Windowed:
    """What is left of a table of pieces where queries see the last ``window`` of their slots."""
    starts, positions = positions_of(pieces, num_queries)
    first_seen = positions - (window - 1)
    found: list[tuple[int, ...]] = []
    rows: list[int] = []
    for row, (slot_start, num_slots, query_start, query_end, limit) in enumerate(pieces.tolist()):
        sees = first_seen[query_start:query_end] < starts[row] + num_slots
        for first, end in runs_of(sees):
            limit_of_first = limit if limit >= num_slots else limit + first
            queries = query_start + first, query_start + end
            found.append((slot_start, num_slots, *queries, limit_of_first))
            rows.append(row)
    kept = np.array(rows, dtype=np.int64)
    table = np.array(found, dtype=np.int64).reshape(-1, 5)
    return Windowed(table, kept, starts[kept], first_seen)


def runs_of(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The half-open ranges of ones that stand side by side."""
    if chosen.all():
        return [(0, len(chosen))] if len(chosen) else []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False]))))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
