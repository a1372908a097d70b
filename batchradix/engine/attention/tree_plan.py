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
    """Queries ``[query_start, query_end)`` over ``num_slots`` slots; ``level`` in its round."""

    slot_start: int
    num_slots: int
    query_start: int
    query_end: int
    causal: bool
    level: int

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


def plan_rounds(step: StepPieces, limits: GroupLimits) -> tuple[Round, ...]:
    """One round unless some query has more than `MAX_LEVELS` pieces.

    From the second round on, level 0 holds what earlier rounds merged.
    """
    rounds: list[list[Piece]] = []
    for index, piece in _levelled(step):
        while len(rounds) <= index:
            rounds.append([])
        rounds[index].append(piece)
    return tuple(_make_round(pieces, step.num_tokens, limits) for pieces in rounds)


def _levelled(step: StepPieces) -> Iterator[tuple[int, Piece]]:
    """Every piece with the number of its round."""
    used = np.zeros(step.num_tokens, dtype=np.int64)
    for slot_start, num_slots, query_start, query_end, causal in _cut(step):
        taken = used[query_start:query_end]
        level = int(taken.max())
        taken[:] = level + 1
        # the first round has MAX_LEVELS places, every later one keeps the first for the sum
        index = 0 if level < MAX_LEVELS else 1 + (level - MAX_LEVELS) // (MAX_LEVELS - 1)
        place = level if index == 0 else 1 + (level - MAX_LEVELS) % (MAX_LEVELS - 1)
        yield index, Piece(slot_start, num_slots, query_start, query_end, causal, place)


def _cut(step: StepPieces) -> Iterator[tuple[int, int, int, int, bool]]:
    """(slot_start, num_slots, query_start, query_end, causal): where partial sums are cut."""
    for slot_start, num_slots, query_start, query_end in step.context.tolist():
        yield slot_start, num_slots, query_start, query_end, False
    for slot_start, num_slots, query_start, _ in step.causal.tolist():
        block = CAUSAL_BLOCK if 2 * num_slots > 3 * CAUSAL_BLOCK else num_slots
        for start in range(0, num_slots, block):
            end = min(start + block, num_slots)
            if start:
                yield slot_start, start, query_start + start, query_start + end, False
            yield slot_start + start, end - start, query_start + start, query_start + end, True


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
    return PaddedGroup(
        queries=queries,
        targets=np.where(real_query, queries, num_tokens),
        levels=np.array([p.level for p in pieces]),
        slots=slot_start + np.where(real_slot, slot, 0),
        visible=visible,
    )
