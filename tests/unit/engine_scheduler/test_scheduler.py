"""The scheduler against a runner that checks every read: answers, counters, memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.errors import RowErrorCode


def distinct(rows: list[list[int]]) -> int:
    """Distinct non-empty prefixes: the tokens a radix tree of the rows has."""
    return len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


def assert_answers(sim: ModuleType, simulation: Any, jobs: list[tuple[Any, Any]]) -> None:
    """Every row answered exactly as alone (the simulation itself refuses a second result)."""
    outcome = simulation.outcome
    num_slots = simulation.runner.num_slots
    seen = 0
    for job, (rows, max_tokens) in enumerate(jobs):
        for row, (prompt, limit) in enumerate(zip(rows, max_tokens, strict=True)):
            if not prompt:
                assert outcome.errors[job, row].code == RowErrorCode.PROMPT_EMPTY
            elif len(prompt) + limit - 1 > num_slots:
                assert outcome.errors[job, row].code == RowErrorCode.KV_POOL_TOO_SMALL
            else:
                alone = sim.answer_alone(prompt, limit, simulation.vocab_size)
                assert outcome.answers[job, row] == alone
            seen += 1
    assert len(outcome.answers) + len(outcome.errors) == seen


def test_rows_that_share_prefixes_compute_each_distinct_token_once(sim: ModuleType) -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [1, 2, 3, 4], [9, 9], [1, 2, 3, 4, 6]]
    simulation = sim.Simulation(num_slots=400)
    simulation.submit(rows, [6] * 6)
    outcome = simulation.drain()
    assert_answers(sim, simulation, [(rows, [6] * 6)])
    assert outcome.usage.computed_tokens == distinct(rows) == 8
    assert outcome.usage.cached_tokens == sum(map(len, rows)) - 8
    assert outcome.usage.recomputed_tokens == 0
    assert outcome.usage.preemptions == 0


def test_a_hundred_rows_with_one_prefix_compute_it_once_and_read_it_as_one_piece(
    sim: ModuleType,
) -> None:
    prefix = list(range(20, 50))
    rows = [[*prefix, 100 + i] for i in range(100)]
    simulation = sim.Simulation(num_slots=2000, batch_size=100, prefill_tokens=200)
    simulation.submit(rows, [4] * 100)
    outcome = simulation.drain()
    assert_answers(sim, simulation, [(rows, [4] * 100)])
    assert outcome.usage.computed_tokens == 130
    first = outcome.steps[0]
    assert first.num_tokens == 130
    assert first.context[0, 1:].tolist() == [30, 30, 130]
    shared = [p for p in outcome.steps[1].context.tolist() if p[3] - p[2] > 1]
    assert [p[1:] for p in shared] == [[30, 0, outcome.steps[1].num_tokens]]


def test_a_row_whose_tail_lies_behind_its_prompt_reads_both_as_one_piece(sim: ModuleType) -> None:
    simulation = sim.Simulation(num_slots=100, vocab_size=1000)
    simulation.submit([[1, 2, 3]], [3])
    outcome = simulation.drain()
    assert [s.context.tolist() for s in outcome.steps] == [[], [[0, 4, 0, 1]], [[0, 5, 0, 1]]]


def test_a_node_larger_than_the_budget_is_prefilled_in_chunks_while_others_decode(
    sim: ModuleType,
) -> None:
    rows = [[1], list(range(2, 42))]
    simulation = sim.Simulation(num_slots=400, prefill_tokens=16, vocab_size=1000)
    simulation.submit(rows, [4, 4])
    outcome = simulation.drain()
    assert_answers(sim, simulation, [(rows, [4, 4])])
    assert [s.num_tokens for s in outcome.steps[:3]] == [16, 17, 10]
    assert outcome.usage.computed_tokens == 41


def test_rows_admitted_later_take_their_first_token_from_the_kept_hidden_state(
    sim: ModuleType,
) -> None:
    rows = [[7, 7, 7]] * 9
    simulation = sim.Simulation(num_slots=400, batch_size=2)
    simulation.submit(rows, [3] * 9)
    outcome = simulation.drain()
    assert_answers(sim, simulation, [(rows, [3] * 9)])
    assert outcome.usage.computed_tokens == 3
    assert outcome.usage.recomputed_tokens == 0
    assert any((s.logit_sources < 0).any() for s in outcome.steps)


def test_a_row_that_ends_inside_a_cached_node_recomputes_only_its_last_token(
    sim: ModuleType,
) -> None:
    simulation = sim.Simulation(num_slots=100)
    simulation.submit([list(range(1, 31))], [2], retain=True)
    simulation.drain()
    simulation.submit([list(range(1, 21))], [2], retain=True)
    outcome = simulation.drain()
    assert outcome.answers[1, 0] == sim.answer_alone(range(1, 21), 2, 5)
    assert outcome.usage.computed_tokens == 30
    assert outcome.usage.recomputed_tokens == 1
    assert outcome.usage.cached_tokens == 20


def test_a_retained_prefix_serves_a_later_job_and_is_dropped_for_need(sim: ModuleType) -> None:
    simulation = sim.Simulation(num_slots=40)
    first = [[1, 2, 3, 4, 5, 6]]
    simulation.submit(first, [1], retain=True)
    simulation.drain()
    assert simulation.scheduler.pool.num_used == 6
    simulation.submit([[1, 2, 3, 4, 5, 7]], [1], retain=True)
    outcome = simulation.drain()
    assert outcome.usage.computed_tokens == 7
    other = [list(range(100, 140))]
    simulation.submit(other, [1], retain=True)
    simulation.drain()
    assert simulation.scheduler.pool.num_used == 40
    assert outcome.answers[2, 0] == sim.answer_alone(other[0], 1, 5)


def test_without_retain_nothing_stays_after_the_last_row(sim: ModuleType) -> None:
    simulation = sim.Simulation(num_slots=60)
    simulation.submit([[1, 2, 3], [1, 2, 4]], [3, 3])
    simulation.drain()
    assert simulation.scheduler.pool.num_free == 60
    assert list(simulation.scheduler.cache.nodes()) == []


def test_a_node_is_kept_for_a_queued_job_that_needs_it(sim: ModuleType) -> None:
    simulation = sim.Simulation(num_slots=60, batch_size=1)
    simulation.submit([[1, 2, 3, 4]], [3])
    simulation.submit([[0, 5], [1, 2, 3, 6]], [3, 3])
    outcome = simulation.drain()
    assert_answers(sim, simulation, [([[1, 2, 3, 4]], [3]), ([[0, 5], [1, 2, 3, 6]], [3, 3])])
    assert outcome.usage.computed_tokens == 4 + 2 + 1


def test_a_node_kept_for_a_row_that_is_refused_goes_with_it(sim: ModuleType) -> None:
    simulation = sim.Simulation(num_slots=10, batch_size=1)
    simulation.submit([[1, 2, 3]], [3])
    simulation.submit([[1, 2, 3, *range(20)]], [3])
    outcome = simulation.drain()
    assert outcome.errors[1, 0].code == RowErrorCode.KV_POOL_TOO_SMALL
    assert simulation.scheduler.pool.num_free == 10


def test_with_the_prefix_cache_off_nothing_is_shared(sim: ModuleType) -> None:
    rows = [[1, 2, 3], [1, 2, 3], [1, 2]]
    simulation = sim.Simulation(num_slots=200, prefix_cache=False)
    simulation.submit(rows, [4] * 3, retain=True)
    simulation.submit(rows, [4] * 3)
    outcome = simulation.drain()
    assert_answers(sim, simulation, [(rows, [4] * 3)] * 2)
    assert outcome.usage.computed_tokens == 16
    assert outcome.usage.cached_tokens == 0
    assert simulation.scheduler.pool.num_free == 200


def test_a_row_too_large_for_the_pool_is_refused_and_the_others_run(sim: ModuleType) -> None:
    rows = [[1, 2, 3], list(range(50)), [], [1, 2, 3, 4]]
    simulation = sim.Simulation(num_slots=10)
    simulation.submit(rows, [3, 3, 3, 8])
    outcome = simulation.drain()
    assert_answers(sim, simulation, [(rows, [3, 3, 3, 8])])
    assert "52" in outcome.errors[0, 1].message
    assert "--kv-tokens" in outcome.errors[0, 1].message


def test_a_preempted_row_goes_on_where_it_was(sim: ModuleType) -> None:
    rows = [[i, i + 1, i + 2] for i in range(1, 30, 3)]
    limits = [60] * 10
    simulation = sim.Simulation(num_slots=90, batch_size=6, vocab_size=10_000)
    simulation.submit(rows, limits)
    outcome = simulation.drain()
    assert_answers(sim, simulation, [(rows, limits)])
    assert outcome.usage.preemptions > 0
    assert outcome.usage.recomputed_tokens > 0
    assert outcome.usage.computed_tokens == 30
    assert outcome.usage.peak_kv_tokens <= 90


def test_the_smallest_pool_that_holds_one_row_finishes_every_row(sim: ModuleType) -> None:
    rows = [[1, 2, 3, i, i + 1] for i in range(12)]
    simulation = sim.Simulation(num_slots=5 + 40 - 1, batch_size=8)
    simulation.submit(rows, [40] * 12)
    simulation.drain()
    assert_answers(sim, simulation, [(rows, [40] * 12)])


def test_a_scattered_pool_is_moved_together_for_a_long_node(sim: ModuleType) -> None:
    simulation = sim.Simulation(num_slots=60, batch_size=20, max_node_extents=1)
    stay = [[i, 100, 101] for i in range(1, 9)]
    simulation.submit(stay, [1] * 8, retain=True)
    simulation.drain()
    scheduler = simulation.scheduler
    for node in list(scheduler.cache.nodes())[::2]:
        scheduler.cache.remove(node)
    simulation.submit([list(range(200, 240))], [3])
    simulation.step()
    step = simulation.outcome.steps[-1]
    assert len(step.moves) > 0
    assert len(step.causal) == 1
    simulation.drain()
    simulation.submit(stay, [1] * 8)
    outcome = simulation.drain()
    assert outcome.answers[1, 0] == sim.answer_alone(range(200, 240), 3, 5)
    for row in range(8):
        assert outcome.answers[2, row] == outcome.answers[0, row]


def test_tokens_that_need_no_sampling_go_through_in_one_span(sim: ModuleType) -> None:
    def forced(row: Any) -> list[int]:
        return [3, 1, 4, 1, 5] if len(row.answer) % 7 == 2 else []

    simulation = sim.Simulation(num_slots=300, vocab_size=10_000, forced=forced)
    rows = [[1, 2, 3], [1, 2, 4]]
    simulation.submit(rows, [30, 30])
    outcome = simulation.drain()
    for row, prompt in enumerate(rows):
        answer: list[int] = []
        while len(answer) < 30:
            token = sim.next_token(sim.prefix_hash([*prompt, *answer]), 10_000)
            answer.append(token)
            if token == sim.EOS:
                break
            if len(answer) % 7 == 2 and len(answer) < 30:
                answer.extend([3, 1, 4, 1, 5][: 29 - len(answer)])
        assert outcome.answers[0, row] == answer
    assert any((s.causal[:, 3] - s.causal[:, 2] >= 5).any() for s in outcome.steps[1:])


tries = st.lists(
    st.lists(st.integers(1, 3), min_size=0, max_size=12).map(
        lambda row: [t for t in row for _ in range(1 + t % 2)]
    ),
    min_size=1,
    max_size=14,
)
job_strategy = tries.flatmap(
    lambda rows: st.tuples(
        st.just(rows),
        st.lists(
            st.one_of(st.integers(1, 4), st.integers(1, 90)),
            min_size=len(rows),
            max_size=len(rows),
        ),
        st.booleans(),
        st.integers(0, 6),
    )
)


@settings(deadline=None, max_examples=200)
@given(
    jobs=st.lists(job_strategy, min_size=1, max_size=4),
    slack=st.one_of(st.integers(-3, 8), st.integers(0, 400)),
    batch_size=st.integers(1, 9),
    prefill_tokens=st.one_of(st.integers(1, 9), st.just(64)),
    prefix_cache=st.booleans(),
    max_node_extents=st.sampled_from([1, 4]),
    vocab_size=st.sampled_from([2, 1000]),
    speculate=st.booleans(),
    room=st.one_of(st.none(), st.integers(1, 40)),
)
def test_every_row_answers_as_if_it_ran_alone(
    sim: ModuleType,
    jobs: list[Any],
    slack: int,
    batch_size: int,
    prefill_tokens: int,
    prefix_cache: bool,
    max_node_extents: int,
    vocab_size: int,
    speculate: bool,
    room: int | None,
) -> None:
    """Whatever pool, batch, budget, memory, jobs and guesses; no slot is lost, none over the
    pool, and a step for which memory runs out computes nothing twice that counts."""
    largest = max(
        len(r) + m - 1 for rows, limits, *_ in jobs for r, m in zip(rows, limits, strict=True)
    )
    num_slots = max(1, largest + slack)
    simulation = sim.Simulation(
        num_slots=num_slots,
        batch_size=batch_size,
        prefill_tokens=prefill_tokens,
        prefix_cache=prefix_cache,
        vocab_size=vocab_size,
        max_node_extents=max_node_extents,
        speculate=speculate,
    )
    simulation.runner.room = room
    for rows, limits, retain, steps_before_next in jobs:
        simulation.submit(rows, limits, retain=retain)
        for _ in range(steps_before_next):
            if simulation.scheduler.has_work:
                simulation.step()
    outcome = simulation.drain()
    assert_answers(sim, simulation, [(rows, limits) for rows, limits, *_ in jobs])
    usage = outcome.usage
    assert usage.peak_kv_tokens <= num_slots
    assert usage.forward_steps == len(outcome.steps)
    for step in outcome.steps:
        assert step.num_tokens <= prefill_tokens + batch_size
    written = sum(len(answer) - 1 for answer in outcome.answers.values())
    num_tokens = sum(step.num_tokens for step in outcome.steps)
    in_vain = usage.drafted_tokens - usage.accepted_tokens
    assert num_tokens == usage.computed_tokens + usage.recomputed_tokens + written + in_vain
    if len(jobs) == 1 and not outcome.errors:
        first_time = distinct(jobs[0][0]) if prefix_cache else sum(map(len, jobs[0][0]))
        assert usage.computed_tokens == first_time
    if not any(retain for *_, retain, _ in jobs):
        assert simulation.scheduler.pool.num_free == num_slots


@settings(deadline=None, max_examples=100)
@given(
    job=job_strategy,
    batch_size=st.integers(1, 9),
    prefill_tokens=st.integers(1, 40),
    retain=st.booleans(),
)
def test_a_pool_that_holds_the_running_rows_computes_exactly_the_distinct_tokens(
    sim: ModuleType, job: Any, batch_size: int, prefill_tokens: int, retain: bool
) -> None:
    rows, limits, *_ = job
    longest = max(map(len, rows))
    enough = batch_size * (longest + 2 * max(limits)) + (sum(map(len, rows)) if retain else 0)
    simulation = sim.Simulation(
        num_slots=max(1, enough), batch_size=batch_size, prefill_tokens=prefill_tokens
    )
    simulation.submit(rows, limits, retain=retain)
    usage = simulation.drain().usage
    assert_answers(sim, simulation, [(rows, limits)])
    assert usage.computed_tokens == distinct(rows)
    assert usage.cached_tokens == sum(map(len, rows)) - distinct(rows)
    assert usage.recomputed_tokens == 0
    assert usage.preemptions == 0


def test_a_plan_of_many_rows_holds_no_object_per_waiting_row(sim: ModuleType) -> None:
    rows = [[i % 251, i // 251] for i in range(20_000)]
    simulation = sim.Simulation(num_slots=1000, batch_size=4)
    simulation.submit(rows, [1] * len(rows))
    for _ in range(20):
        simulation.step()
    assert len(list(simulation.scheduler.cache.nodes())) < 30
    assert len(simulation.outcome.answers) < 200


def test_step_arrays_have_the_shapes_the_runner_expects(sim: ModuleType) -> None:
    simulation = sim.Simulation(num_slots=50)
    simulation.submit([[1, 2]], [2])
    simulation.step()
    step = simulation.outcome.steps[0]
    for name in ("token_ids", "positions", "slots", "logit_sources", "hold_ids", "free_holds"):
        array = getattr(step, name)
        assert array.dtype == np.int64
        assert array.ndim == 1
    assert step.context.shape == (0, 4)
    assert step.causal.shape == (1, 4)
    assert step.moves.shape == (0, 3)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_an_empty_job_is_no_work(sim: ModuleType, prefix_cache: bool) -> None:
    simulation = sim.Simulation(num_slots=50, prefix_cache=prefix_cache)
    simulation.submit([], [])
    assert not simulation.scheduler.has_work


def test_a_true_guess_saves_steps_and_a_wrong_one_costs_none(sim: ModuleType) -> None:
    rows = [[1, 2, 3], [1, 2, 4], [7]]
    taken = []
    for speculate in (False, True):
        simulation = sim.Simulation(num_slots=400, vocab_size=10_000, speculate=speculate)
        simulation.submit(rows, [60] * 3)
        outcome = simulation.drain()
        assert_answers(sim, simulation, [(rows, [60] * 3)])
        assert outcome.usage.recomputed_tokens == 0
        taken.append(outcome.usage.forward_steps)
    assert 0 < outcome.usage.accepted_tokens < outcome.usage.drafted_tokens
    assert taken[1] < taken[0] / 1.5


def test_guesses_take_no_slots_from_others(sim: ModuleType) -> None:
    """A pool that just holds the rows without guesses preempts none for them."""
    rows = [[1, 2, i] for i in range(3, 9)]
    for num_slots in (30, 45, 90, 200):
        preempted = []
        for speculate in (False, True):
            simulation = sim.Simulation(
                num_slots=num_slots, batch_size=6, vocab_size=10_000, speculate=speculate
            )
            simulation.submit(rows, [20] * 6)
            preempted.append(simulation.drain().usage.preemptions)
            assert_answers(sim, simulation, [(rows, [20] * 6)])
        if preempted[0] == 0:
            assert preempted[1] == 0


def test_a_row_preempted_with_a_draft_starts_over_without_it(sim: ModuleType) -> None:
    simulation = sim.Simulation(
        num_slots=60, batch_size=6, prefill_tokens=8, vocab_size=10_000, speculate=True
    )
    rows = [[1, 2, i] for i in range(3, 9)]
    simulation.submit(rows, [40] * 6)
    outcome = simulation.drain()
    assert_answers(sim, simulation, [(rows, [40] * 6)])
    assert outcome.usage.preemptions > 0
    assert outcome.usage.accepted_tokens > 0
