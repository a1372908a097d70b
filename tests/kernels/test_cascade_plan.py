"""Work items cover what every query attends to, once, in order, and fit their tiles."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix_kernels.tree_attention.cascade_plan import (
    MIN_SPLIT_SLOTS,
    CascadePlan,
    plan_cascade,
    split_slots,
)
from batchradix_kernels.tree_attention.reference import slots_of_query

TILE_ROWS = (16, 64)


def plan(context, causal, num_queries, *, group=4, num_programs=8, window=None) -> CascadePlan:
    return plan_cascade(
        np.array(context, dtype=np.int64).reshape(-1, 4),
        np.array(causal, dtype=np.int64).reshape(-1, 4),
        num_queries,
        group=group,
        num_kv_heads=2,
        tile_rows=TILE_ROWS,
        num_programs=num_programs,
        window=window,
    )


def slots_seen(made: CascadePlan, query: int) -> list[int]:
    """What the items of a query's parts show it, part after part."""
    items = np.concatenate(made.items)
    seen: list[int] = []
    for part in made.parts[made.offsets[query] : made.offsets[query + 1]]:
        ((first, start, end, query_start, _, first_part, limit, position),) = items[
            (items[:, 5] <= part) & (part < items[:, 5] + items[:, 4])
        ]
        assert query == query_start + part - first_part
        if len(made.first_seen):
            start = max(start, made.first_seen[query] - position)
        seen.extend(range(first + start, first + min(end, limit + query - query_start)))
    return seen


@st.composite
def pieces(draw):
    """Pieces over disjoint slots, some empty, a few long ones among them."""
    num_queries = draw(st.integers(1, 90))
    context, causal, at = [], [], 0
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, num_queries))
        end = draw(st.integers(start, num_queries))
        is_causal = draw(st.booleans())
        length = end - start if is_causal else draw(st.sampled_from([0, 1, 70, 300, 1500]))
        (causal if is_causal else context).append((at, length, start, end))
        at += length
    return context, causal, num_queries


def nested(context, causal, num_queries):
    """The pieces that hold the queries of every later one, or none of them: a tree's."""
    kept: list[list[tuple[int, ...]]] = [[], []]
    taken: list[tuple[int, ...]] = []
    covered = np.zeros(num_queries, dtype=bool)  # by a causal piece, which ends a query's pieces
    for kind, group in enumerate((context, causal)):
        for piece in group:
            _, _, start, end = piece
            fits = all((a <= start and end <= b) or end <= a or b <= start for *_, a, b in taken)
            if fits and start < end and not covered[start:end].any():
                kept[kind].append(piece)
                taken.append(piece)
                covered[start:end] |= kind == 1
    return *kept, num_queries


@settings(deadline=None, max_examples=100)
@given(
    case=pieces(),
    group=st.sampled_from([1, 3, 8, 16]),
    num_programs=st.sampled_from([1, 100, 100_000]),
    window=st.sampled_from([None, 1, 40, 300]),
)
def test_every_query_sees_its_slots_once_and_in_order(case, group, num_programs, window):
    """With a window, the last of them; no item begins before what its queries see."""
    context, causal, num_queries = case if window is None else nested(*case)
    made = plan(context, causal, num_queries, group=group, num_programs=num_programs, window=window)
    seen = [slots_of_query(query, context, causal) for query in range(num_queries)]
    seen = seen if window is None else [slots[-window:] for slots in seen]
    for query in range(num_queries):
        assert slots_seen(made, query) == seen[query]
    for item in np.concatenate(made.items).tolist():
        first, start, _, query_start, count, *_ = item
        places = [slot - first for t in range(query_start, query_start + count) for slot in seen[t]]
        assert window is None or start >= min(place for place in places if place >= 0)
    for rows, items in zip(TILE_ROWS, made.items, strict=True):
        assert (items[:, 4] * group <= rows).all()
        assert (items[:, 4] > 0).all()
        assert (items[:, 2] > items[:, 1]).all()
    assert made.num_parts == sum(int(items[:, 4].sum()) for items in made.items)


def test_pieces_with_few_rows_get_the_low_tile():
    made = plan([(0, 50, 0, 20), (50, 9, 0, 4), (59, 9, 4, 9)], [], 20)
    assert made.items[0][:, [0, 3, 4]].tolist() == [[50, 0, 4]]
    assert made.items[1][:, [0, 3, 4]].tolist() == [[0, 0, 16], [0, 16, 4], [59, 4, 5]]


def test_long_items_come_first_so_that_none_is_waited_for_at_the_end():
    made = plan([(0, 5, 0, 1), (5, 90, 1, 2), (95, 40, 2, 3)], [], 3)
    assert made.items[0][:, 0].tolist() == [5, 95, 0]
    assert slots_seen(made, 0) == [0, 1, 2, 3, 4]


def test_a_causal_piece_with_cached_slots_before_it_hides_only_what_is_new():
    made = plan([], [(7, 12, 0, 3)], 3)
    assert [slots_seen(made, query) for query in range(3)] == [
        list(range(7, 17)),
        list(range(7, 18)),
        list(range(7, 19)),
    ]


def test_a_long_node_is_split_where_it_would_leave_processors_idle():
    node = [(0, 4096, 0, 16)]
    assert len(plan(node, [], 16, num_programs=1).items[1]) == 1
    assert len(plan(node, [], 16, num_programs=16).items[1]) == 8  # two key heads each
    assert len(plan(node, [], 16, num_programs=100_000).items[1]) == 4096 // MIN_SPLIT_SLOTS
    assert split_slots(100, 8) == MIN_SPLIT_SLOTS
    assert split_slots(8000, 8) == 512


def test_a_step_without_pieces_has_no_items():
    made = plan([], [], 3)
    assert [len(items) for items in made.items] == [0, 0]
    assert made.offsets.tolist() == [0, 0, 0, 0]
