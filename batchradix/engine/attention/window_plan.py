"""Cuts attention at absolute positions, so that a row's sums do not depend on other rows.

Where partial sums are cut decides how they round. The pieces of a step follow the tree, which
depends on the rows that share it; windows of `WINDOW` positions, as many as the CPU kernels take
at a time, counted from the start of the prompt, do not. A window that lies in one piece is
attended to with all queries of that piece; a window that several pieces share (a node ends inside
it) is put together of their parts, once for the queries below. Sums over a window are then added
up in order of position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batchradix.engine.step import Step, i64_table
from batchradix.types import I64
from batchradix_kernels.tree_attention.cpu import WINDOW

Part = tuple[int, int]  # slot_start, num_slots


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """``runs``: int64[n, 6] of (first_part, end_part, query_start, query_end, num_positions,
    limit): the queries of the range attend to the positions that the parts make up one after
    the other, which begin at a multiple of `WINDOW`; query ``query_start + i`` to the first
    ``min(num_positions, limit + i)`` of them. ``parts``: int64[m, 2] of (slot_start,
    num_slots). The runs of a query stand in order of position and cover it without a gap.
    """

    runs: I64
    parts: I64


def plan_windows(step: Step) -> WindowPlan:
    """The windows of a step whose pieces cover every query's positions from 0 on."""
    pieces = sorted(
        [
            *((q, -end, s, n, False) for s, n, q, end in step.context.tolist()),
            *((q, -end, s, n, True) for s, n, q, end in step.causal.tolist()),
        ],
        key=lambda piece: piece[:2],  # stable: pieces of one range stay in order of position
    )
    builder = _Builder()
    open_ranges: list[_Open] = []
    for query_start, negative_end, slot_start, num_slots, causal in pieces:
        while open_ranges and open_ranges[-1].query_end <= query_start:
            builder.close(open_ranges.pop())
        above = open_ranges[-1] if open_ranges else None
        if above is not None:
            builder.skip_to(above, query_start)
            above.cursor = -negative_end
        state = _Open(query_start, -negative_end, [] if above is None else list(above.parts))
        builder.add(state, slot_start, num_slots, causal=causal)
        open_ranges.append(state)
    while open_ranges:
        builder.close(open_ranges.pop())
    return builder.finish()


@dataclass(slots=True)
class _Open:
    """Queries ``[cursor, query_end)`` whose last window so far holds ``parts`` only."""

    cursor: int
    query_end: int
    parts: list[Part]


@dataclass(slots=True)
class _Builder:
    _runs: list[tuple[int, ...]] = field(default_factory=list)
    _parts: list[Part] = field(default_factory=list)

    def add(self, state: _Open, slot_start: int, num_slots: int, *, causal: bool) -> None:
        """Prolongs a range by one piece; what does not fill a window stays open.

        The queries of a causal piece have no other behind it, so nothing of it stays open.
        """
        query, query_end = state.cursor, state.query_end
        held = sum(count for _, count in state.parts)
        limit = held + 1 if causal else None
        if held:  # the window begun by the pieces above
            taken = min(WINDOW - held, num_slots)
            parts = [*state.parts, (slot_start, taken)]
            if not causal and held + taken < WINDOW:
                state.parts = parts
                return
            self._emit(parts, query, query_end, limit)
            slot_start, num_slots = slot_start + taken, num_slots - taken
            if causal:
                query, limit = query + taken, 1
        whole = num_slots - num_slots % WINDOW
        if whole:
            self._emit([(slot_start, whole)], query, query_end, limit)
        rest = [(slot_start + whole, num_slots - whole)] if whole < num_slots else []
        if causal:
            if rest:
                self._emit(rest, query + whole, query_end, 1)
            state.cursor, rest = query_end, []
        state.parts = rest

    def skip_to(self, state: _Open, query: int) -> None:
        """Ends the queries before ``query`` that no further piece belongs to."""
        if state.parts and state.cursor < query:
            self._emit(state.parts, state.cursor, query, None)
        state.cursor = query

    def close(self, state: _Open) -> None:
        self.skip_to(state, state.query_end)

    def finish(self) -> WindowPlan:
        return WindowPlan(runs=i64_table(self._runs, 6), parts=i64_table(self._parts, 2))

    def _emit(self, parts: list[Part], query: int, query_end: int, limit: int | None) -> None:
        first = len(self._parts)
        self._parts.extend(parts)
        num_positions = sum(count for _, count in parts)
        visible = num_positions if limit is None else limit
        self._runs.append((first, len(self._parts), query, query_end, num_positions, visible))
