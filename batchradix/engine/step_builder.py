"""Lays out one `Step`: queries in depth-first order, and which slots each of them attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from batchradix.engine.cache.pool import Extent
from batchradix.engine.cache.radix import RadixNode
from batchradix.engine.cache.tiers import Transfers
from batchradix.engine.row import RunningRow
from batchradix.engine.step import Step, i64_table

Piece = tuple[int, int, int, int]  # slot_start, num_slots, query_start, query_end


@dataclass(slots=True)
class StepWork:
    """What a step is to do, decided by the scheduler.

    ``nodes``: per node the tokens ``[first, first + count)`` of its edge that go through the
    model; a node's parent is complete or completed here. ``spans``: per row how many of its
    pending answer tokens do, and after all of these its draft, if it has one; its leaf is
    complete or completed here. ``first_tokens``: rows
    that get their first logits from their leaf's hidden state.
    """

    nodes: dict[RadixNode, tuple[int, int]] = field(default_factory=dict)
    spans: list[tuple[RunningRow, int]] = field(default_factory=list)
    first_tokens: list[RunningRow] = field(default_factory=list)

    def completes(self, node: RadixNode) -> bool:
        """Whether all tokens of the node have keys and values once the step has run."""
        first, count = self.nodes.get(node, (node.num_computed, 0))
        return first + count >= len(node)

    @property
    def is_empty(self) -> bool:
        return not (self.nodes or self.spans or self.first_tokens)


class StepBuilder:
    """Queries and pieces of one step; used once.

    The order is that of the tree: a node's own tokens, then the answer tokens of rows that
    end at it, then its children. So the queries below a node are one range, and each shared
    extent is one piece whatever the number of rows below.
    """

    def __init__(self, work: StepWork) -> None:
        self._work = work
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._context: list[Piece] = []
        self._causal: list[Piece] = []
        self.last_query: dict[RadixNode | RunningRow, int] = {}
        self._lay_out()

    def finish(
        self,
        *,
        logit_sources: Sequence[int],
        holds: Sequence[tuple[int, int]],
        free_holds: Sequence[int],
        moves: Sequence[tuple[int, int, int]],
        transfers: Transfers,
    ) -> Step:
        """The step; ``holds`` are (query, hold id)."""
        kept = i64_table(holds, 2)
        return Step(
            token_ids=np.array(self._token_ids, dtype=np.int64),
            positions=np.array(self._positions, dtype=np.int64),
            slots=np.array(self._slots, dtype=np.int64),
            context=i64_table(self._context, 4),
            causal=i64_table(self._causal, 4),
            moves=i64_table(moves, 3),
            logit_sources=np.array(logit_sources, dtype=np.int64),
            hold_queries=np.ascontiguousarray(kept[:, 0]),
            hold_ids=np.ascontiguousarray(kept[:, 1]),
            free_holds=np.array(free_holds, dtype=np.int64),
            loads=transfers.loads,
            saves=transfers.saves,
            spills=transfers.spills,
            reloads=transfers.reloads,
        )

    def _lay_out(self) -> None:
        children: dict[RadixNode, list[RadixNode]] = {}
        rows: dict[RadixNode, list[tuple[RunningRow, int]]] = {}
        tops: list[RadixNode] = []
        seen: set[RadixNode] = set()

        def mark(node: RadixNode) -> None:
            while node not in seen:
                seen.add(node)
                parent = node.parent
                assert parent is not None
                if parent.parent is None:
                    tops.append(node)
                    return
                children.setdefault(parent, []).append(node)
                node = parent

        for node in self._work.nodes:
            mark(node)
        for row, count in self._work.spans:
            assert row.leaf is not None
            mark(row.leaf)
            rows.setdefault(row.leaf, []).append((row, count))

        # A node comes off the stack twice: with -1 on the way down, and on the way up with
        # its place in `ranges`, which is preorder.
        ranges: list[tuple[RadixNode, int, int]] = []
        stack = [(node, -1) for node in reversed(tops)]
        while stack:
            node, place = stack.pop()
            if place >= 0:
                ranges[place] = node, ranges[place][1], len(self._token_ids)
                continue
            stack.append((node, len(ranges)))
            ranges.append((node, len(self._token_ids), -1))
            self._add_node(node)
            for row, count in rows.get(node, ()):
                self._add_span(row, count)
            stack.extend((child, -1) for child in reversed(children.get(node, ())))
        # Pieces from the top down: those of one query then stand in order of position.
        for node, query, end_query in ranges:
            first, count = self._work.nodes.get(node, (len(node), 0))
            self._add_pieces(node.extents, first, count, query, end_query)
            for row, count in rows.get(node, ()):
                end_query = self.last_query[row] + 1
                query = end_query - count
                self._add_pieces(row.tail, row.num_written, count, query, end_query)

    def _add_node(self, node: RadixNode) -> None:
        work = self._work.nodes.get(node)
        if work is None:
            return
        first, count = work
        self._token_ids.extend(node.tokens[first : first + count].tolist())
        self._positions.extend(range(node.start + first, node.start + first + count))
        self._add_slots(node.extents, first, count)
        self.last_query[node] = len(self._token_ids) - 1

    def _add_span(self, row: RunningRow, count: int) -> None:
        first = row.num_written
        position = len(row.prompt) + first
        self._token_ids.extend(row.answer[first : first + count])
        if row.draft is not None:
            self._token_ids.extend(row.draft.token_ids)
        self._positions.extend(range(position, position + count))
        self._add_slots(row.tail, first, count)
        self.last_query[row] = len(self._token_ids) - 1

    def _add_slots(self, extents: Sequence[Extent], first: int, count: int) -> None:
        for start, length in _cut(extents, first, count):
            self._slots.extend(range(start, start + length))

    def _add_pieces(
        self, extents: Sequence[Extent], first: int, count: int, query: int, end_query: int
    ) -> None:
        """What an owner's slots mean to the queries ``[query, end_query)`` at and below it.

        Its tokens ``[0, first)`` were computed before; ``[first, first + count)`` are the
        first ``count`` of the queries.
        """
        if count <= 1:  # a single token is seen by itself and by all below it
            for start, length in _cut(extents, 0, first + count):
                self._add_context(start, length, query, end_query)
            return
        for start, length in _cut(extents, 0, first):
            self._add_context(start, length, query, end_query)
        for start, length in _cut(extents, first, count):
            self._causal.append((start, length, query, query + length))
            query += length
            if query < end_query:
                self._add_context(start, length, query, end_query)

    def _add_context(self, start: int, length: int, query: int, end_query: int) -> None:
        """Adds a piece, or prolongs the last one where it goes on for the same queries."""
        if self._context:
            last_start, last_length, last_query, last_end = self._context[-1]
            if (last_query, last_end, last_start + last_length) == (query, end_query, start):
                self._context[-1] = last_start, last_length + length, query, end_query
                return
        self._context.append((start, length, query, end_query))


def _cut(extents: Sequence[Extent], first: int, count: int) -> list[Extent]:
    """The extents of slots ``[first, first + count)`` of an owner."""
    parts = []
    for start, length in extents:
        if count <= 0:
            break
        if first >= length:
            first -= length
            continue
        taken = min(length - first, count)
        parts.append((start + first, taken))
        count -= taken
        first = 0
    return parts
