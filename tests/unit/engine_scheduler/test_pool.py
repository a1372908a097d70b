"""The extent pool against a plain set of free slots."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.cache.pool import Extent, ExtentPool, compact, split_extents


def slots_of(extents: list[Extent]) -> list[int]:
    return [slot for start, length in extents for slot in range(start, start + length)]


def test_a_request_takes_the_shortest_run_that_is_long_enough() -> None:
    pool = ExtentPool(30)
    pool.allocate(30)
    pool.free([(0, 10), (12, 4), (20, 7)])
    assert pool.allocate(4) == [(12, 4)]
    assert pool.allocate(5) == [(20, 5)]
    assert pool.free_runs == [(0, 10), (25, 2)]
    assert pool.largest_free == 10


def test_only_what_no_run_holds_is_cut() -> None:
    pool = ExtentPool(20)
    pool.allocate(20)
    pool.free([(0, 3), (5, 6), (15, 2)])
    assert pool.allocate(10) == [(5, 6), (0, 3), (15, 1)]
    assert pool.num_free == 1


def test_too_large_a_request_takes_nothing() -> None:
    pool = ExtentPool(8)
    assert pool.allocate(9) is None
    assert pool.num_free == 8


def test_a_tail_grows_into_the_free_slots_behind_it() -> None:
    pool = ExtentPool(20)
    assert pool.allocate(5) == [(0, 5)]
    assert pool.extend(5, 4) == 4
    assert pool.allocate(3) == [(9, 3)]
    assert pool.extend(9, 4) == 0
    pool.free([(9, 3)])
    assert pool.extend(9, 40) == 11
    assert pool.peak_used == 20


@pytest.mark.parametrize("again", [(4, 2), (3, 2), (5, 4), (0, 1), (7, 1), (19, 2), (-1, 1)])
def test_freeing_free_or_foreign_slots_is_refused(again: Extent) -> None:
    pool = ExtentPool(20)
    pool.allocate(20)
    pool.free([(0, 2), (4, 2), (7, 2)])
    with pytest.raises(AssertionError):
        pool.free([again])


def test_a_lost_slot_and_a_second_owner_are_found() -> None:
    pool = ExtentPool(10)
    pool.allocate(6)
    pool.check([(0, 6)])
    with pytest.raises(AssertionError, match="lost"):
        pool.check([(0, 5)])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check([(0, 6), (5, 1)])


@settings(deadline=None)
@given(
    num_slots=st.integers(1, 60),
    actions=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(0, 99))),
)
def test_slots_are_handed_out_once_and_runs_coalesce(
    num_slots: int, actions: list[tuple[int, int, int]]
) -> None:
    pool = ExtentPool(num_slots)
    free = set(range(num_slots))
    owned: list[list[Extent]] = []
    for kind, size, choice in actions:
        if kind == 0:
            extents = pool.allocate(size)
            assert (extents is None) == (size > len(free))
            if extents is not None:
                assert len(slots_of(extents)) == size
                free -= set(slots_of(extents))
                owned.append(extents)
        elif owned and kind == 1:
            extents = owned.pop(choice % len(owned))
            pool.free(extents)
            free |= set(slots_of(extents))
        elif owned:
            owner = owned[choice % len(owned)]
            end = sum(owner[-1])
            taken = pool.extend(end, size)
            assert set(range(end, end + taken)) <= free
            assert taken == size or end + taken not in free
            free -= set(range(end, end + taken))
            owner[-1] = (owner[-1][0], owner[-1][1] + taken)
        pool.check([e for owner in owned for e in owner])
        assert pool.num_free == len(free)
        runs = [s for s in free if s - 1 not in free]
        assert len(pool.free_runs) == len(runs)
        assert sorted(slots_of(pool.free_runs)) == sorted(free)


@settings(deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=8),
    kept=st.lists(st.booleans(), min_size=8, max_size=8),
    wanted=st.integers(1, 40),
    max_moved=st.integers(0, 60),
)
def test_compaction_frees_one_run_and_moves_every_slot_with_its_content(
    sizes: list[list[int]], kept: list[bool], wanted: int, max_moved: int
) -> None:
    pool = ExtentPool(sum(map(sum, sizes)) + 5)
    owners: list[list[Extent]] = [[] for _ in sizes]
    for turn in range(3):  # owners in turn, so that their extents lie scattered
        for owner, parts in zip(owners, sizes, strict=True):
            if turn < len(parts):
                owner.extend(pool.allocate(parts[turn]) or [])
    for owner, keep in zip(owners, kept, strict=False):
        if not keep:
            pool.free(owner)
            owner.clear()
    content = list(range(pool.num_slots))
    before = [slots_of(owner) for owner in owners]
    num_free = pool.num_free
    moves = compact(pool, owners, wanted, max_moved=max_moved)
    read = [content[s : s + n] for s, _, n in moves]
    assert len(set(slots_of([(s, n) for s, _, n in moves]))) == sum(n for *_, n in moves)
    assert len(set(slots_of([(t, n) for _, t, n in moves]))) == sum(n for *_, n in moves)
    for (_, target, n), values in zip(moves, read, strict=True):
        content[target : target + n] = values
    assert [[content[s] for s in slots_of(owner)] for owner in owners] == before
    assert pool.num_free == num_free
    pool.check([e for owner in owners for e in owner])
    assert sum(n for *_, n in moves) <= max_moved
    if moves or (wanted <= num_free and max_moved >= pool.num_slots):
        assert pool.largest_free >= wanted


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_splitting_extents_keeps_every_slot_in_order(
    lengths: list[int], data: st.DataObject
) -> None:
    extents = [(10 * i, n) for i, n in enumerate(lengths)]
    cut = data.draw(st.integers(0, sum(lengths)))
    above, below = split_extents(extents, cut)
    assert len(slots_of(above)) == cut
    assert slots_of(above) + slots_of(below) == slots_of(extents)
