"""Which slots of a step's pieces lie in the sliding windows of their queries.

A query with a window of ``w`` tokens sees, of the slots of its pieces in order of position, the
last ``w``, its own included. Only numpy: this runs once a step, on the host.

Legend: T queries, n context and m causal pieces, as in `tree_attention_reference`; those of a query
stand in order of position and hold all of its positions, from the first token on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["WindowedPiece", "clip_to_window", "positions_of", "runs_of"]

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WindowedPiece:
    """Queries ``[query_start, query_end)`` over slots of which each sees at least one.

    Query ``query_start + i`` sees those from ``lows[i]`` on, counted from ``slot_start``; the last
    of them is ``limit + i - 1`` where the piece is causal, which is below ``num_slots``.
    """

    slot_start: int
    num_slots: int
    query_start: int
    query_end: int
    lows: I64
    limit: int | None


def positions_of(context: I64, causal: I64, num_queries: int) -> tuple[I64, I64]:
    """The position of each piece's first slot, int64[n + m], and of each query, int64[T]."""
    seen = np.zeros(num_queries, dtype=np.int64)
    starts = np.empty(len(context) + len(causal), dtype=np.int64)
    for index, (_, num_slots, query_start, query_end) in enumerate(context[:, :4].tolist()):
        starts[index] = seen[query_start]
        seen[query_start:query_end] += num_slots
    for index, (_, num_slots, query_start, query_end) in enumerate(
        causal[:, :4].tolist(), len(context)
    ):
        starts[index] = seen[query_start]
        hidden = query_end - query_start - 1  # from the first query
        seen[query_start:query_end] += np.arange(num_slots - hidden, num_slots + 1)
    return starts, seen - 1


def clip_to_window(
    context: I64, causal: I64, num_queries: int, window: int
) -> Iterator[WindowedPiece]:
    """The pieces without the queries that see nothing of them and the slots that no query sees.

    A causal piece may have more slots than queries: the last query sees all of it.
    """
    starts, positions = positions_of(context, causal, num_queries)
    first_seen = positions - (window - 1)
    for index, (slot_start, num_slots, query_start, query_end) in enumerate(
        [*context.tolist(), *causal.tolist()]
    ):
        lows = np.maximum(first_seen[query_start:query_end] - starts[index], 0)
        limit = None if index < len(context) else num_slots - (query_end - query_start) + 1
        for first, end in runs_of(lows < num_slots):
            least = int(lows[first:end].min())
            last = num_slots if limit is None else limit + end - 1
            yield WindowedPiece(
                slot_start + least,
                last - least,
                query_start + first,
                query_start + end,
                lows[first:end] - least,
                None if limit is None else limit + first - least,
            )


def runs_of(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The half-open ranges of ones that stand side by side."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False]))))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
