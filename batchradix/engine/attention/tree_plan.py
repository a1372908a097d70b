"""Cuts a step's attention into calls: which pieces run alone, which are padded together.

Each piece gets a *level*, a place where its partial results wait to be merged: the pieces of
one query all have different levels. No tensor here, only numpy; the calls do not depend on
the layer, so this runs once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchradix.types import I64
from batchradix_kernels.tree_attention.window import piece_table, runs_of, windowed

# Measured on two AVX-512 cores: a padded product beats one call a piece below these sizes,
# from four pieces on; padding may cost half again as much plus what a call costs anyway.
MAX_PADDED_SLOTS = 256
MAX_PADDED_SCORES = 8192
MIN_PADDED_PIECES = 4
PADDING_FACTOR = 1.5
PADDING_SLACK = 1 << 14
GATHER_ROWS = 16  # gathering a key costs as much as multiplying it with this many rows
MAX_GROUP_ELEMENTS = 1 << 21  # of gathered keys and values, and of scores
# A causal piece costs as much as a full one, so long ones are cut into a staircase of full
# pieces and small causal ones (a third less at 512 queries).
CAUSAL_BLOCK = 64
MAX_LEVELS = 8


class StepPieces(Protocol):
    """What of a `Step` is cut here: all of its pieces, or some."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def context(self) -> I64: ...

    @property
    def causal(self) -> I64: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries ``[query_start, query_end)`` over ``num_slots`` slots; ``level`` in its round.

    ``lows``: int64[num_queries], the first slot that each query sees, at least one of them; None
    where all of them see all, or what is causal.
    """

    slot_start: int
    num_slots: int
    query_start: int
    query_end: int
    causal: bool
    level: int
    lows: I64 | None = None

    @property
    def num_queries(self) -> int:
        return self.query_end - self.query_start


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """``b`` pieces padded to ``n`` queries and ``s`` slots.

    ``queries``: int64[b, n]; ``targets``: int64[b, n], the query, or T where padding;
    ``levels``: int64[b]; ``slots``: int64[b, s], padded with a slot of the same piece, so that
    nothing outside the piece is ever read; ``visible``: bool[b, n, s].
    """

    queries: I64
    targets: I64
    levels: I64
    slots: I64
    visible: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Round:
    """Pieces whose partial results fit the levels at once; merged before the next round."""

    num_levels: int
    alone: tuple[Piece, ...]
    groups: tuple[PaddedGroup, ...]


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What padding costs depends on the model's heads."""

    queries_per_kv_head: int
    num_kv_heads: int
    kv_width: int  # elements of a slot's key and value


def plan_rounds(
    step: StepPieces, limits: GroupLimits, window: int | None = None
) -> tuple[Round, ...]:
    """One round unless some query has more than `MAX_LEVELS` pieces. With a ``window`` a query
    sees the last so many of its slots.

    From the second round on, level 0 holds what earlier rounds merged.
    """
    rounds: list[list[Piece]] = []
    for index, piece in _levelled(step, window):
        while len(rounds) <= index:
            rounds.append([])
        rounds[index].append(piece)
    return tuple(_make_round(pieces, step.num_tokens, limits) for pieces in rounds)


def _levelled(step: StepPieces, window: int | None) -> Iterator[tuple[int, Piece]]:
    """Every piece with the number of its round."""
    used = np.zeros(step.num_tokens, dtype=np.int64)
    cuts = _cut(step) if window is None else _cut_windowed(step, window)
    for slot_start, num_slots, query_start, query_end, causal, lows in cuts:
        taken = used[query_start:query_end]
        level = int(taken.max())
        taken[:] = level + 1
        # the first round has MAX_LEVELS places, every later one keeps the first for the sum
        index = 0 if level < MAX_LEVELS else 1 + (level - MAX_LEVELS) // (MAX_LEVELS - 1)
        place = level if index == 0 else 1 + (level - MAX_LEVELS) % (MAX_LEVELS - 1)
        yield index, Piece(slot_start, num_slots, query_start, query_end, causal, place, lows)


Cut = tuple[int, int, int, int, bool, I64 | None]


def _cut(step: StepPieces) -> Iterator[Cut]:
    """(slot_start, num_slots, query_start, query_end, causal, lows): where partial sums are cut."""
    for slot_start, num_slots, query_start, query_end in step.context.tolist():
        yield slot_start, num_slots, query_start, query_end, False, None
    for slot_start, num_slots, query_start, _ in step.causal.tolist():
        block = CAUSAL_BLOCK if 2 * num_slots > 3 * CAUSAL_BLOCK else num_slots
        for start in range(0, num_slots, block):
            end = min(start + block, num_slots)
            if start:
                yield slot_start, start, query_start + start, query_start + end, False, None
            yield (
                slot_start + start,
                end - start,
                query_start + start,
                query_start + end,
                True,
                None,
            )


def _cut_windowed(step: StepPieces, window: int) -> Iterator[Cut]:
    """The same where queries see the last ``window`` of their slots."""
    found = windowed(piece_table(step.context, step.causal), step.num_tokens, window)
    for piece, start in zip(found.pieces.tolist(), found.starts.tolist(), strict=True):
        _, num_slots, query_start, query_end, limit = piece
        lows = np.maximum(found.first_seen[query_start:query_end] - start, 0)
        varies = limit < num_slots or bool(lows.any())
        block = CAUSAL_BLOCK if varies else query_end - query_start
        for first in range(query_start, query_end, block):
            end = min(first + block, query_end)
            behind = min(limit + first - query_start - 1, num_slots) if limit < num_slots else -1
            some = lows[first - query_start : end - query_start]
            yield from _cut_block(piece[0], num_slots, first, end, behind, some)


def _cut_block(
    slot_start: int, num_slots: int, query_start: int, query_end: int, behind: int, lows: I64
) -> Iterator[Cut]:
    """A few queries of a piece, of which each sees the slots from one of ``lows`` on: slots that
    windows begin in, those that all see and, where it is causal, those from ``behind`` on, what
    is before the first query; else that is negative."""
    is_causal = behind >= 0
    end = behind if is_causal else num_slots
    least, most = int(lows.min()), int(lows.max())
    edge = least  # of what all see; one more where they differ, so that each sees one before it
    if most > least:
        edge = min(most + 1, end)
    for start in range(least, edge, MAX_PADDED_SLOTS):
        stop = min(start + MAX_PADDED_SLOTS, edge)
        for a, b in runs_of(lows < stop):
            seen = np.maximum(lows[a:b] - start, 0)
            queries = query_start + a, query_start + b
            some = seen if seen.any() else None
            yield slot_start + start, stop - start, *queries, False, some
    if edge < end:
        yield slot_start + edge, end - edge, query_start, query_end, False, None
    if is_causal:
        seen = np.maximum(lows - end, 0)
        some = seen if seen.any() else None
        yield slot_start + end, query_end - query_start, query_start, query_end, True, some


def _make_round(pieces: list[Piece], num_tokens: int, limits: GroupLimits) -> Round:
    small: list[Piece] = []
    alone: list[Piece] = []
    for piece in pieces:
        rows = piece.num_queries * limits.queries_per_kv_head
        fits = piece.num_slots <= MAX_PADDED_SLOTS and rows * piece.num_slots <= MAX_PADDED_SCORES
        (small if fits else alone).append(piece)
    groups = []
    for group in _similar(small, limits):
        if len(group) < MIN_PADDED_PIECES:
            alone.extend(group)
        else:
            groups.append(_pad(group, num_tokens))
    groups.extend(_pad([piece], num_tokens) for piece in alone if piece.lows is not None)
    alone = [piece for piece in alone if piece.lows is None]
    num_levels = 1 + max(piece.level for piece in pieces)
    return Round(num_levels, tuple(alone), tuple(groups))


def _similar(pieces: list[Piece], limits: GroupLimits) -> Iterator[list[Piece]]:
    """Pieces of like size together, as long as padding them costs less than another call."""
    group: list[Piece] = []
    most_slots = most_rows = useful = 0
    for piece in sorted(pieces, key=lambda p: (p.num_queries, p.num_slots)):
        rows = piece.num_queries * limits.queries_per_kv_head
        cost = piece.num_slots * (rows + GATHER_ROWS)
        slots = max(most_slots, piece.num_slots)
        rows = max(most_rows, rows)
        count = len(group) + 1
        padded = count * slots * (rows + GATHER_ROWS)
        elements = count * slots * limits.num_kv_heads * max(limits.kv_width, rows)
        if group and (
            padded > PADDING_FACTOR * (useful + cost) + PADDING_SLACK
            or elements > MAX_GROUP_ELEMENTS
        ):
            yield group
            group, useful = [], 0
            slots, rows = piece.num_slots, piece.num_queries * limits.queries_per_kv_head
        group.append(piece)
        most_slots, most_rows, useful = slots, rows, useful + cost
    if group:
        yield group


def _pad(pieces: list[Piece], num_tokens: int) -> PaddedGroup:
    slot_start = np.array([p.slot_start for p in pieces])[:, None]
    num_slots = np.array([p.num_slots for p in pieces])[:, None]
    query_start = np.array([p.query_start for p in pieces])[:, None]
    num_queries = np.array([p.num_queries for p in pieces])[:, None]
    causal = np.array([p.causal for p in pieces])[:, None, None]
    query = np.arange(num_queries.max())[None, :]
    slot = np.arange(num_slots.max())[None, :]
    real_query, real_slot = query < num_queries, slot < num_slots
    queries = query_start + np.where(real_query, query, 0)
    visible = real_slot[:, None, :] & (~causal | (slot[:, None, :] <= query[:, :, None]))
    for index, piece in enumerate(pieces):
        if piece.lows is not None:
            visible[index, : piece.num_queries] &= slot >= piece.lows[:, None]
    return PaddedGroup(
        queries=queries,
        targets=np.where(real_query, queries, num_tokens),
        levels=np.array([p.level for p in pieces]),
        slots=slot_start + np.where(real_slot, slot, 0),
        visible=visible,
    )
