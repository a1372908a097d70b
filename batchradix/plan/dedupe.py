"""Rows that must have the same answer run once; the others take it over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchradix.types import I32, I64, U64, Plan, TokenTable


def find_duplicates(
    tokens: TokenTable,
    plan: Plan,
    *,
    settings_id: I32,
    max_tokens: I32,
    rng_key: U64,
    is_greedy: NDArray[np.bool_],
) -> I64:
    """int64[num_rows]: for each table row the row whose answer it takes, itself for a leader.

    Two rows of the plan have the same answer when tokens, settings and ``max_tokens`` agree
    and, unless the row is greedy, its random numbers too. The leader is the first of them by
    row number. All arrays are by table row: ``settings_id``, ``max_tokens``: int32;
    ``rng_key``: uint64; ``is_greedy``: bool. Rows outside the plan lead themselves.
    """
    leaders = np.arange(len(tokens), dtype=np.int64)
    order = plan.order
    if len(order) < 2:
        return leaders
    length = tokens.lengths[order]
    repeats = (plan.lcp[1:] == length[1:]) & (length[1:] == length[:-1])
    group = np.concatenate([[0], np.cumsum(~repeats)])
    # Only positions in a group of several need sorting by everything else.
    shared = np.flatnonzero(np.append(repeats, False) | np.insert(repeats, 0, False))
    rows = order[shared]
    greedy = np.asarray(is_greedy, dtype=np.bool_)[rows]
    keys = (
        group[shared],
        np.asarray(settings_id)[rows],
        np.asarray(max_tokens)[rows],
        greedy,
        np.where(greedy, np.uint64(0), np.asarray(rng_key, dtype=np.uint64)[rows]),
    )
    ranked = np.lexsort((rows, *reversed(keys)))
    rows = rows[ranked]
    begins = np.ones(len(rows), dtype=np.bool_)
    if len(rows):
        changes = [key[ranked][1:] != key[ranked][:-1] for key in keys]
        begins[1:] = np.logical_or.reduce(changes)
    leaders[rows] = rows[begins][np.cumsum(begins) - 1]
    return leaders


def drop_followers(plan: Plan, leaders: I64) -> Plan:
    """The plan of the leaders alone; ``leaders`` as `find_duplicates` returns them.

    What a row shares with the leader before it is the least shared on the way there.
    """
    kept = np.flatnonzero(leaders[plan.order] == plan.order)
    if len(kept) == 0:
        return Plan(order=plan.order[:0], lcp=plan.lcp[:0])
    begins = np.concatenate([[0], kept[:-1] + 1])
    lcp = np.minimum.reduceat(plan.lcp[: kept[-1] + 1], begins)
    lcp[0] = 0
    return Plan(order=plan.order[kept], lcp=lcp)
