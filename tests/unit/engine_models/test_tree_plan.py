"""How a step's pieces become calls: nothing lost, nothing doubled, nothing outside read."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.attention.tree_plan import (
    MAX_GROUP_ELEMENTS,
    MAX_LEVELS,
    GroupLimits,
    plan_rounds,
)
from batchradix.engine.step import Step, empty_i64

LIMITS = GroupLimits(queries_per_kv_head=3, num_kv_heads=2, kv_width=32)


def make_step(num_tokens: int, context: list, causal: list) -> Step:
    def rows(values):
        return np.array(values, dtype=np.int64).reshape(-1, 4)

    nothing = empty_i64(0)
    return Step(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.zeros(num_tokens, dtype=np.int64),
        slots=np.zeros(num_tokens, dtype=np.int64),
        context=rows(context),
        causal=rows(causal),
        moves=empty_i64(0, 3),
        logit_sources=nothing,
        hold_queries=nothing,
        hold_ids=nothing,
        free_holds=nothing,
    )


@st.composite
def steps(draw) -> Step:
    num_tokens = draw(st.sampled_from([1, 7, 30, 60, 150]))
    context, causal, slot = [], [], 0
    for _ in range(draw(st.integers(1, 40))):
        start = draw(st.integers(0, num_tokens - 1))
        end = draw(st.integers(start + 1, num_tokens))
        num_slots = draw(st.sampled_from([1, 2, 5, 40, 300]))
        if draw(st.booleans()):
            causal.append((slot, end - start, start, end))
            slot += end - start
        else:
            context.append((slot, num_slots, start, end))
            slot += num_slots
    return make_step(num_tokens, context, causal)


def pairs_of_step(step: Step) -> list[tuple[int, int]]:
    pairs = [
        (query, slot)
        for slot_start, num_slots, start, end in step.context.tolist()
        for query in range(start, end)
        for slot in range(slot_start, slot_start + num_slots)
    ]
    return pairs + [
        (query, slot_start + j)
        for slot_start, _, start, end in step.causal.tolist()
        for query in range(start, end)
        for j in range(query - start + 1)
    ]


def pairs_of_round(current, num_tokens: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(query, slot) pairs that are attended, and (query, level) places that are written."""
    pairs, places = [], []
    for piece in current.alone:
        for i, query in enumerate(range(piece.query_start, piece.query_end)):
            seen = i + 1 if piece.causal else piece.num_slots
            pairs += [(query, piece.slot_start + j) for j in range(seen)]
            places.append((query, piece.level))
    for group in current.groups:
        for b, n in np.argwhere(group.targets < num_tokens):
            query = int(group.targets[b, n])
            assert query == group.queries[b, n]
            pairs += [(query, int(s)) for s in group.slots[b, group.visible[b, n]]]
            places.append((query, int(group.levels[b])))
    return pairs, places


@settings(deadline=None, max_examples=60)
@given(steps())
def test_every_query_meets_every_slot_of_its_pieces_once(step):
    attended: list[tuple[int, int]] = []
    for number, current in enumerate(plan_rounds(step, LIMITS)):
        pairs, places = pairs_of_round(current, step.num_tokens)
        attended += pairs
        assert len(places) == len(set(places))
        lowest = 0 if number == 0 else 1
        assert all(lowest <= level < current.num_levels <= MAX_LEVELS for _, level in places)
    assert sorted(attended) == sorted(pairs_of_step(step))


@settings(deadline=None, max_examples=60)
@given(steps())
def test_padding_reads_slots_of_its_own_piece_only_and_every_row_sees_one(step):
    for current in plan_rounds(step, LIMITS):
        for group in current.groups:
            for b in range(len(group.slots)):
                seen = group.slots[b][group.visible[b].any(axis=0)]
                assert set(group.slots[b].tolist()) <= set(seen.tolist())
            assert group.visible.any(axis=2).all()
            elements = group.slots.size * LIMITS.num_kv_heads * LIMITS.kv_width
            assert elements <= MAX_GROUP_ELEMENTS


def test_private_tails_of_decoding_rows_share_one_padded_product():
    context = [(0, 300, 0, 64)] + [(300 + 60 * i, 40 + i % 10, i, i + 1) for i in range(64)]
    (current,) = plan_rounds(make_step(64, context, []), LIMITS)
    assert [piece.num_slots for piece in current.alone] == [300]
    assert sum(len(group.slots) for group in current.groups) == 64
    assert len(current.groups) == 1


def test_a_few_pieces_are_not_worth_padding():
    (current,) = plan_rounds(make_step(3, [(10 * i, 9, i, i + 1) for i in range(3)], []), LIMITS)
    assert current.groups == ()
    assert len(current.alone) == 3


def test_a_long_causal_piece_becomes_a_staircase_of_half_its_work():
    (current,) = plan_rounds(make_step(512, [], [(10, 512, 0, 512)]), LIMITS)
    work = sum(piece.num_queries * piece.num_slots for piece in current.alone)
    work += sum(group.visible.size for group in current.groups)
    assert work < 0.6 * 512 * 512
    assert current.num_levels == 2
