"""The KV pool's slots as numbers: which are free, who gets which. No tensor is touched here.

An *extent* is a run of slots ``(start, length)``. The pool knows free extents only; who owns
an allocated one is the owner's business (nodes of the radix cache, tails of running rows).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np

from batchradix.types import I64

Extent = tuple[int, int]
"""A run of slots: (start, length), length at least 1."""


class ExtentPool:
    """Free slots of ``[0, num_slots)`` as sorted, coalesced runs.

    Allocation is best fit: the shortest free run that is long enough, so long runs survive
    for long nodes. Only a request that no single run can hold is cut into several extents.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, "a pool has at least one slot"
        self.num_slots = num_slots
        self.num_free = num_slots
        self.peak_used = 0
        self._starts: list[int] = [0]
        self._length: dict[int, int] = {0: num_slots}  # by start
        self._by_size: list[tuple[int, int]] = [(num_slots, 0)]  # (length, start)

    @property
    def num_used(self) -> int:
        return self.num_slots - self.num_free

    @property
    def largest_free(self) -> int:
        """Length of the longest free run, 0 when the pool is full."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_runs(self) -> list[Extent]:
        """The free runs in order of address; a fresh list."""
        return [(start, self._length[start]) for start in self._starts]

    def allocate(self, num_slots: int) -> list[Extent] | None:
        """Takes ``num_slots`` slots; None (and nothing taken) when fewer are free.

        One extent where a free run is long enough, else as few as the longest runs allow.
        """
        if num_slots > self.num_free:
            return None
        extents: list[Extent] = []
        while num_slots > 0:
            place = bisect_left(self._by_size, (num_slots, 0))
            length, start = self._by_size[min(place, len(self._by_size) - 1)]
            taken = min(length, num_slots)
            self._take(start, taken)
            extents.append((start, taken))
            num_slots -= taken
        self._note_peak()
        return extents

    def extend(self, end: int, num_slots: int) -> int:
        """Takes up to ``num_slots`` free slots that begin exactly at ``end``; how many."""
        length = self._length.get(end, 0)
        taken = min(length, num_slots)
        if taken:
            self._take(end, taken)
            self._note_peak()
        return taken

    def free(self, extents: Iterable[Extent]) -> None:
        """Gives slots back; neighbouring free runs become one.

        AssertionError when a slot is free already or lies outside the pool.
        """
        for start, length in extents:
            assert length > 0, "an extent has at least one slot"
            end = start + length
            assert 0 <= start < end <= self.num_slots, "a slot outside the pool was freed"
            place = bisect_left(self._starts, start)
            if place > 0:
                before = self._starts[place - 1]
                before_end = before + self._length[before]
                assert before_end <= start, "a slot was freed twice"
            if place < len(self._starts):
                assert end <= self._starts[place], "a slot was freed twice"
            self.num_free += length
            if end in self._length:
                length += self._length[end]
                self._drop(end)
            if place > 0 and before_end == start:
                length += self._length[before]
                self._drop(before)
                start = before
            self._add(start, length)

    def find_region(self, num_slots: int) -> tuple[int, int, int] | None:
        """The cheapest region to compact for a free run of ``num_slots``.

        Returns ``(start, end, num_occupied)``: the region ``[start, end)`` begins and ends
        with a free run, holds at least ``num_slots`` free slots and the fewest occupied ones.
        None when fewer are free.
        """
        best: tuple[int, int, int] | None = None
        free = 0
        low = 0
        runs = self.free_runs
        for start, length in runs:
            free += length
            while free - runs[low][1] >= num_slots:
                free -= runs[low][1]
                low += 1
            if free >= num_slots:
                begin, end = runs[low][0], start + length
                occupied = end - begin - free
                if best is None or occupied < best[2]:
                    best = (begin, end, occupied)
        return best

    def settle_region(self, start: int, end: int, used_end: int) -> None:
        """Records that ``[start, used_end)`` is used and ``[used_end, end)`` free.

        For a compaction of a region found by `find_region`: the number of free slots does not
        change (AssertionError).
        """
        first = bisect_left(self._starts, start)
        runs = [s for s in self._starts[first:] if s < end]
        assert sum(self._length[s] for s in runs) == end - used_end, "compaction lost slots"
        for run in runs:
            self._drop(run)
        self._add(used_end, end - used_end)

    def check(self, used: Sequence[Extent]) -> None:
        """AssertionError unless ``used`` and the free runs cover every slot exactly once."""
        edge = 0
        for start, length in sorted([*used, *self.free_runs]):
            assert start == edge, "a slot is lost" if start > edge else "a slot has two owners"
            edge = start + length
        assert edge == self.num_slots, "a slot is lost"
        assert self.num_free == sum(self._length.values()), "the free slots are miscounted"
        assert self._by_size == sorted((n, s) for s, n in self._length.items())

    def _note_peak(self) -> None:
        self.peak_used = max(self.peak_used, self.num_used)

    def _take(self, start: int, taken: int) -> None:
        length = self._length[start]
        self._drop(start)
        if taken < length:
            self._add(start + taken, length - taken)
        self.num_free -= taken

    def _add(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._length[start] = length
        insort(self._by_size, (length, start))

    def _drop(self, start: int) -> None:
        length = self._length.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (length, start))]


def slots_of(extents: Iterable[Extent]) -> I64:
    """int64[n]: every slot of the extents (at least one), in order."""
    return np.concatenate([np.arange(start, start + length) for start, length in extents])


def split_extents(extents: Sequence[Extent], num_slots: int) -> tuple[list[Extent], list[Extent]]:
    """The extents of the first ``num_slots`` slots and those of the rest; nothing is copied."""
    before: list[Extent] = []
    after: list[Extent] = []
    for start, length in extents:
        taken = min(length, num_slots)
        num_slots -= taken
        if taken:
            before.append((start, taken))
        if taken < length:
            after.append((start + taken, length - taken))
    return before, after


def compact(
    pool: ExtentPool, owners: Iterable[list[Extent]], num_slots: int, *, max_moved: int
) -> list[tuple[int, int, int]]:
    """Moves owned extents together so that ``num_slots`` free slots become one run.

    Side effects: the owners' extent lists are rewritten in place (extents of one owner that
    end up side by side become one), and so are the pool's free runs. ``owners`` must name
    every owner of a slot in the pool.

    Returns the copies to make as (source, target, num_slots); sources are disjoint, targets
    are disjoint, a source may overlap another copy's target, so all reads come before all
    writes. Empty, and nothing changed, when more than ``max_moved`` slots would have to move.
    """
    region = pool.find_region(num_slots)
    if region is None or region[2] > max_moved:
        return []
    begin, end, _ = region
    inside = [o for o in owners if any(begin <= start < end for start, _ in o)]
    inside.sort(key=lambda o: min(start for start, _ in o if begin <= start < end))
    moves: list[tuple[int, int, int]] = []
    target = begin
    for owner in inside:
        placed: list[Extent] = []
        for start, length in owner:
            if begin <= start < end:
                if start != target:
                    moves.append((start, target, length))
                start = target
                target += length
            if placed and placed[-1][0] + placed[-1][1] == start:
                placed[-1] = (placed[-1][0], placed[-1][1] + length)
            else:
                placed.append((start, length))
        owner[:] = placed
    pool.settle_region(begin, end, target)
    return moves
