"""Rows that must have the same answer run once; the others take it over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from batchradix.scratch import Scratch, windows
from batchradix.types import I32, I64, U64, Plan, TokenTable


def find_duplicates(
    tokens: TokenTable,
    plan: Plan,
    *,
    settings_id: I32 | I64,
    max_tokens: I32,
    rng_key: U64,
    is_greedy: NDArray[np.bool_],
    scratch: Scratch | None = None,
) -> I64:
    """int64[num_rows]: for each table row the row whose answer it takes, itself for a leader.

    Two rows of the plan have the same answer when tokens, settings and ``max_tokens`` agree
    and, unless the row is greedy, its random numbers too. The leader is the first of them by
    row number. All arrays are by table row: ``settings_id``, ``max_tokens``: integers;
    ``rng_key``: uint64; ``is_greedy``: bool. Rows outside the plan lead themselves. The array is
    made in ``scratch`` (None: in memory).
    """
    scratch = scratch or Scratch(least_bytes=None)
    leaders = scratch.zeros(len(tokens), np.int64)
    for part in scratch.windows(len(tokens)):
        leaders[part] = np.arange(part.start, part.stop)
    for begin, stop in _whole_groups(tokens, plan):
        scratch.let_go()
        order = np.asarray(plan.order[begin:stop])
        repeats = _repeats(tokens, plan, begin, stop)[1:]
        group = np.cumsum(np.append(False, ~repeats))
        # Only positions in a group of several need sorting by everything else.
        shared = np.flatnonzero(np.append(repeats, False) | np.insert(repeats, 0, False))
        if not len(shared):
            continue
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
        changes = [key[ranked][1:] != key[ranked][:-1] for key in keys]
        begins[1:] = np.logical_or.reduce(changes)
        leaders[rows] = rows[begins][np.cumsum(begins) - 1]
    return leaders


def _repeats(tokens: TokenTable, plan: Plan, begin: int, stop: int) -> NDArray[np.bool_]:
    """bool[stop - begin]: positions whose row equals the one before it."""
    before = max(0, begin - 1)
    order = np.asarray(plan.order[before:stop])
    length = tokens.offsets[order + 1] - tokens.offsets[order]
    equal = np.append(False, (plan.lcp[before + 1 : stop] == length[1:]) & (np.diff(length) == 0))
    return equal[begin - before :]


def _whole_groups(tokens: TokenTable, plan: Plan) -> Iterator[tuple[int, int]]:
    """Position ranges that together hold all rows; equal rows are in one of them."""
    begin = 0
    for part in windows(len(plan)):
        if part.stop == len(plan):
            yield begin, part.stop
            return
        parted = np.flatnonzero(~_repeats(tokens, plan, part.start, part.stop))
        if len(parted) and part.start + int(parted[-1]) > begin:
            yield begin, part.start + int(parted[-1])
            begin = part.start + int(parted[-1])


def drop_followers(plan: Plan, leaders: I64, scratch: Scratch | None = None) -> Plan:
    """The plan of the leaders alone; ``leaders`` as `find_duplicates` returns them.

    What a row shares with the leader before it is the least shared on the way there. The arrays
    are made in ``scratch`` (None: in memory).
    """
    scratch = scratch or Scratch(least_bytes=None)
    num_kept = 0
    for part in scratch.windows(len(plan)):
        order = plan.order[part]
        num_kept += int((leaders[order] == order).sum())
    kept_order, kept_lcp = scratch.zeros(num_kept, np.int64), scratch.zeros(num_kept, np.int32)
    filled = 0
    least = 0  # shared since the last leader, 0 before the first
    for part in scratch.windows(len(plan)):
        order, lcp = np.asarray(plan.order[part]), np.asarray(plan.lcp[part])
        kept = np.flatnonzero(leaders[order] == order)
        if not len(kept):
            least = min(least, int(lcp.min()))
            continue
        found = np.minimum.reduceat(lcp[: kept[-1] + 1], np.append(0, kept[:-1] + 1))
        found[0] = min(int(found[0]), least)
        here = slice(filled, filled + len(kept))
        kept_order[here], kept_lcp[here] = order[kept], found
        filled = here.stop
        rest = lcp[kept[-1] + 1 :]
        least = int(rest.min()) if len(rest) else np.iinfo(np.int32).max
    return Plan(order=kept_order, lcp=kept_lcp)
