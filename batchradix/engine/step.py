"""The one message that goes from the scheduler to the model runner each step, and its answer.

The scheduler builds a `Step` without touching a tensor; the runner executes it without taking
a scheduling decision. All queries of a step stand in depth-first order of their place in the
tree, so the queries below any node are one half-open range ``[query_start, query_end)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from batchradix.types import I64


def empty_i64(*shape: int) -> I64:
    """int64 array of the given shape, for a step's unused parts."""
    return np.zeros(shape, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlock:
    """Keys and values of tokens from position ``start`` on, outside the pool.

    ``k``, ``v``: the bytes of [layers, key heads, tokens, head dimension] in the run's dtype.
    """

    start: int
    k: memoryview
    v: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLoad:
    """Slots to fill from a block, from its ``first``-th token on.

    ``extents``: int64[n, 2] of (slot_start, num_slots), in order of position.
    """

    extents: I64
    first: int
    block: KVBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSave:
    """Slots to keep in the store under ``key``: int64[n] of them, from position ``start`` on."""

    key: str
    start: int
    slots: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """Slots of the pool and places beside it (`SpillSpace`) that hold the same tokens.

    Both int64[n, 2] of (start, length), in order of position and of one length together.
    """

    extents: I64
    places: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass. ``T`` query tokens, ``R`` rows whose logits are wanted.

    ``token_ids``, ``positions``, ``slots``: int64[T]; a negative token id ``-1 - i`` stands for
    the ``i``-th token of those that are being chosen while the step is laid out. The key and value
    of query ``t`` are written to pool slot ``slots[t]`` in every layer *before* that layer attends.

    ``context``: int64[n, 4] of (slot_start, num_slots, query_start, query_end): every query of
    the range attends to all ``num_slots`` slots. A running row's private tail is such a piece
    with one query, its own new slot included. ``causal``: int64[m, 4] likewise with
    ``num_slots == query_end - query_start``: query ``query_start + i`` attends to slots
    ``[slot_start, slot_start + i]``. Every query lies in at least one piece that holds its own
    slot; pieces of one query never overlap in slots. Slots of a piece are contiguous and in
    order of position.

    ``moves``: int64[k, 3] of (source, target, num_slots), disjoint copies to make in the pool
    before anything else, all reads before all writes. ``loads`` fill slots after that and before
    the forward pass; ``saves`` are taken from the pool after it. ``spills`` go from the pool to
    their places before anything else, ``reloads`` come from there beside the loads.

    ``logit_sources``: int64[R]; ``q >= 0`` is a query of this step, ``-1 - h`` the hidden state
    kept under hold id ``h`` by an earlier step. ``hold_queries``, ``hold_ids``: int64[H]: keep
    the final hidden state of that query under that id, after the forward pass and before
    logits. ``free_holds``: int64[F], hold ids to forget, after logits.
    """

    token_ids: I64
    positions: I64
    slots: I64
    context: I64
    causal: I64
    moves: I64 = field(default_factory=partial(empty_i64, 0, 3))
    logit_sources: I64 = field(default_factory=partial(empty_i64, 0))
    hold_queries: I64 = field(default_factory=partial(empty_i64, 0))
    hold_ids: I64 = field(default_factory=partial(empty_i64, 0))
    free_holds: I64 = field(default_factory=partial(empty_i64, 0))
    loads: tuple[KVLoad, ...] = ()
    saves: tuple[KVSave, ...] = ()
    spills: tuple[KVTransfer, ...] = ()
    reloads: tuple[KVTransfer, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def part(self, first: int, last: int) -> Step:
        """The forward pass over the queries ``[first, last)`` alone, which are counted from 0.

        A query reads nothing that a later one writes, so the parts of a step, run in order, write
        and read what the whole does. Moves, transfers, holds and logits are no part of it.
        """
        context, _ = _clip(self.context, first, last)
        causal, skipped = _clip(self.causal, first, last)
        # What a causal piece holds before ``first`` is context now, behind all that is above it.
        above = causal[skipped > 0]
        above[:, 1] = skipped[skipped > 0]
        causal[:, 0] += skipped
        causal[:, 1] = causal[:, 3] - causal[:, 2]
        return Step(
            token_ids=self.token_ids[first:last],
            positions=self.positions[first:last],
            slots=self.slots[first:last],
            context=np.concatenate([context, above]),
            causal=causal,
        )


def _clip(pieces: I64, first: int, last: int) -> tuple[I64, I64]:
    """The pieces that queries ``[first, last)`` see, their ranges counted from ``first``; and how
    many queries before ``first`` each of them had."""
    seen = pieces[(pieces[:, 2] < last) & (pieces[:, 3] > first)]
    skipped = np.maximum(0, first - seen[:, 2])
    seen[:, 2:] = np.clip(seen[:, 2:], first, last) - first
    return seen, skipped


def i64_table(rows: Sequence[tuple[int, ...]], width: int) -> I64:
    """int64[len(rows), width]."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)
