"""The radix cache: matching, splitting, locking, and who is evicted first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.cache.pool import ExtentPool
from batchradix.engine.cache.radix import RadixCache, RadixNode
from batchradix.types import U32

NO_ORIGIN = (0, 0)


def ids(*tokens: int) -> U32:
    return np.array(tokens, dtype=np.uint32)


def add(cache: RadixCache, tokens: Sequence[int]) -> RadixNode:
    """Caches a whole row, as the scheduler does; its leaf, idle."""
    row = ids(*tokens)
    node, depth = cache.match(row)
    if depth < node.end:
        node = cache.split(node, depth)
    if depth < len(row):
        extents = cache.pool.allocate(len(row) - depth)
        assert extents is not None
        cache.lock(node)
        leaf = cache.insert(node, row[depth:], extents, NO_ORIGIN)
        cache.lock(leaf)
        cache.unlock(node)
        node = leaf
    else:
        cache.lock(node)
    cache.unlock(node)
    return node


def prefixes(cache: RadixCache) -> set[tuple[int, ...]]:
    return {
        tuple(t for part in node.path() for t in part.tokens.tolist()) for node in cache.nodes()
    }


def never(node: RadixNode) -> int | None:
    return None


def test_a_match_ends_where_the_tokens_part_even_inside_a_node() -> None:
    cache = RadixCache(ExtentPool(20))
    leaf = add(cache, [1, 2, 3, 4])
    assert cache.match(ids(1, 2, 9)) == (leaf, 2)
    assert cache.match(ids(1, 2)) == (leaf, 2)
    assert cache.match(ids(1, 2, 3, 4, 5)) == (leaf, 4)
    assert cache.match(ids(7)) == (cache.root, 0)


def test_a_split_leaves_slots_locks_and_the_hold_where_they_were() -> None:
    cache = RadixCache(ExtentPool(20))
    leaf = add(cache, [1, 2, 3, 4])
    leaf.num_computed = 3
    leaf.hold = 7
    cache.lock(leaf)
    used = cache.pool.num_used
    upper = cache.split(leaf, 2)
    assert leaf.path() == [upper, leaf]
    assert (upper.extents, leaf.extents) == ([(0, 2)], [(2, 2)])
    assert (upper.num_computed, leaf.num_computed) == (2, 1)
    assert (upper.locks, leaf.locks) == (1, 1)
    assert (upper.hold, leaf.hold) == (None, 7)
    assert cache.pool.num_used == used
    cache.check()
    cache.unlock(leaf)
    cache.check()
    assert cache.num_idle_slots == 4


def test_an_idle_chain_can_go_at_once_after_a_split_in_it() -> None:
    cache = RadixCache(ExtentPool(20))
    add(cache, [1, 2])
    leaf = add(cache, [1, 2, 3, 4, 5])
    cache.split(leaf, 4)
    cache.check()
    assert cache.evict(5, never) == 5
    assert prefixes(cache) == set()


def test_the_least_recently_used_leaf_goes_first_and_a_parent_after_its_children() -> None:
    cache = RadixCache(ExtentPool(40))
    add(cache, [1, 2, 3])
    add(cache, [5, 6])
    add(cache, [1, 2, 4])
    assert cache.evict(1, never) == 1
    assert prefixes(cache) == {(5, 6), (1, 2), (1, 2, 4)}
    assert cache.evict(2, never) == 2
    assert prefixes(cache) == {(1, 2), (1, 2, 4)}
    assert cache.evict(2, never) == 3
    assert prefixes(cache) == set()
    assert cache.pool.num_free == 40


def test_planned_nodes_go_last_and_the_furthest_use_first() -> None:
    cache = RadixCache(ExtentPool(40))
    near, far, unplanned = add(cache, [1]), add(cache, [2]), add(cache, [3])
    use = {near: 5, far: 9, unplanned: None}
    cache.evict(1, use.get)
    assert prefixes(cache) == {(1,), (2,)}
    cache.evict(1, use.get)
    assert prefixes(cache) == {(1,)}


def test_locked_nodes_are_never_evicted() -> None:
    cache = RadixCache(ExtentPool(40))
    leaf = add(cache, [1, 2, 3])
    add(cache, [1, 2, 4, 5])
    cache.lock(leaf)
    assert cache.evict(40, never) == 2
    assert prefixes(cache) == {(1, 2), (1, 2, 3)}


def test_a_removed_node_gives_its_hold_back() -> None:
    cache = RadixCache(ExtentPool(10))
    leaf = add(cache, [1])
    leaf.hold = 3
    cache.evict(1, never)
    assert cache.freed_holds == [3]


def test_unlocking_twice_is_refused() -> None:
    cache = RadixCache(ExtentPool(10))
    leaf = add(cache, [1])
    with pytest.raises(AssertionError):
        cache.unlock(leaf)


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=25),
    evictions=st.lists(st.integers(0, 6), min_size=25, max_size=25),
)
def test_the_cache_holds_each_distinct_prefix_once(
    rows: list[list[int]], evictions: list[int]
) -> None:
    cache = RadixCache(ExtentPool(25 * 7))
    for row, num_slots in zip(rows, evictions, strict=False):
        add(cache, row)
        cache.check()
        _, depth = cache.match(ids(*row))
        assert depth == len(row)
        idle = cache.num_idle_slots
        assert cache.evict(num_slots, never) >= min(num_slots, idle)
        cache.check()
        cache.pool.check([e for node in cache.nodes() for e in node.extents])
    cached = {p[: i + 1] for p in prefixes(cache) for i in range(len(p))}
    assert cache.pool.num_used == len(cached)
