"""Several workers as one engine: whoever runs them, every row is answered once."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_crew import PretendCrew

from batchradix.errors import EngineError, RowErrorCode
from batchradix.fleet import FleetEngine
from batchradix.fleet.crew import Lost, Report
from batchradix.fleet.engine import (
    DEATHS_OF_A_ROW,
    MOST_DEATHS_BEFORE_ANY,
    MOST_DEATHS_IN_VAIN,
)
from batchradix.plan.order import make_plan
from batchradix.plan.shards import split_plan
from batchradix.plan.tree import build_tree
from batchradix.types import (
    Completion,
    EngineJob,
    FinishReason,
    RequestTable,
    RowSettings,
    TokenTable,
)

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=60)


def job_of(rows: list[list[int]]) -> EngineJob:
    tokens = TokenTable.from_rows(rows)
    plan = make_plan(tokens)
    count = len(rows)
    return EngineJob(
        tokens=tokens,
        plan=plan,
        tree=build_tree(plan, tokens.lengths),
        requests=RequestTable(
            settings=(RowSettings(), RowSettings(top_k=3)),
            settings_id=np.arange(count, dtype=np.int32) % 2,
            max_tokens=np.full(count, 4, dtype=np.int32),
            rng_key=np.arange(count, dtype=np.uint64),
        ),
    )


def fleet(crew: PretendCrew, **changes: Any) -> FleetEngine:
    values = {"context_length": 99, "batch_size": 1, "prefix_cache": True, "timeout_s": 60.0}
    return FleetEngine(crew, **(values | changes))


def drain(engine: FleetEngine) -> dict[int, Completion]:
    """Completions by row; exactly one each."""
    done: dict[int, Completion] = {}
    for _ in range(100_000):
        if not engine.has_work:
            return done
        for completion in engine.step():
            assert completion.row not in done, "a row was answered twice"
            done[completion.row] = completion
    raise AssertionError("it does not end")


def check_answers(rows: list[list[int]], done: dict[int, Completion]) -> None:
    """The double answers with the prompt, so that a mixed-up row shows."""
    assert {row: list(one.token_ids) for row, one in done.items()} == dict(enumerate(rows))


def documents(count: int, questions: int) -> list[list[int]]:
    """Rows of 20 tokens about ``count`` documents, in mixed order."""
    rows = [
        [0, 0, *[one + 1] * 16, q // 10, q % 10] for one in range(count) for q in range(questions)
    ]
    Random(5).shuffle(rows)
    return rows


@given(ROWS, st.integers(1, 5), st.integers(0, 3), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_every_row_is_answered_once_and_what_is_computed_twice_is_counted(
    rows: list[list[int]], num_workers: int, seed: int, batch_size: int
) -> None:
    crew = PretendCrew(num_workers, seed=seed, pace=[1.0, 9.0, 0.1, 1.0, 1.0][:num_workers])
    engine = fleet(crew, batch_size=batch_size)
    job = job_of(rows)
    engine.submit(job)
    check_answers(rows, drain(engine))
    assert crew.computed_tokens == job.tree.distinct_tokens + engine.usage.duplicated_tokens
    assert engine.usage.computed_tokens == crew.computed_tokens


def test_workers_that_keep_pace_compute_twice_what_the_planners_shards_do() -> None:
    rows = documents(6, 20)
    job = job_of(rows)
    crew = PretendCrew(3, pace=[1, 1, 1])
    engine = fleet(crew, batch_size=1000)  # takes all of its own at once, so none is left
    engine.submit(job)
    drain(engine)
    shards = split_plan(job.plan, job.tokens.lengths, job.requests.max_tokens, 3)
    assert engine.usage.duplicated_tokens == shards.duplicated_tokens.sum() > 0
    assert [sum(sent) for sent in crew.sent] == np.diff(shards.cuts).tolist()


def test_workers_with_documents_of_their_own_compute_less_than_with_rows_in_turn() -> None:
    rows = documents(8, 20)
    by_plan, by_turns = (job_of(rows) for _ in range(2))
    crew = PretendCrew(4)
    engine = fleet(crew, batch_size=1000)
    engine.submit(by_plan)
    drain(engine)
    in_turn = 0
    for worker in range(4):
        dealt = job_of(rows[worker::4])
        in_turn += dealt.tree.distinct_tokens
    predicted = by_turns.tree.distinct_tokens + engine.usage.duplicated_tokens
    assert crew.computed_tokens == predicted
    assert in_turn / crew.computed_tokens > 1.5


def test_a_fast_worker_takes_parts_of_a_slow_one() -> None:
    rows = documents(6, 20)
    crew = PretendCrew(2, pace=[1, 50])
    engine = fleet(crew)
    job = job_of(rows)
    engine.submit(job)
    check_answers(rows, drain(engine))
    assert sum(crew.sent[1]) > 1.5 * sum(crew.sent[0])
    assert crew.computed_tokens == job.tree.distinct_tokens + engine.usage.duplicated_tokens


def test_rows_of_a_lost_worker_run_on_the_one_that_replaces_it() -> None:
    rows = documents(6, 20)
    draw, deaths = Random(3), []

    def dies(worker: int, tokens: tuple[int, ...]) -> bool:
        if len(deaths) < 3 and draw.random() < 0.1:
            deaths.append(worker)
            return True
        return False

    crew = PretendCrew(2, dies=dies)
    engine = fleet(crew)
    engine.submit(job_of(rows))
    check_answers(rows, drain(engine))
    assert len(deaths) == 3
    assert sum(crew.starts) == 2 + 3
    assert any("was lost and replaced: it was killed" in text for text in engine.notices)
    assert set(crew.ran.values()) == {1}, "a finished row ran again"


@pytest.mark.parametrize("num_workers", [1, 3])
def test_rows_that_kill_workers_become_error_rows_and_all_others_are_answered(
    num_workers: int,
) -> None:
    rows = documents(6, 20)
    poisoned = {17, 90}
    for row in poisoned:
        rows[row] = [*rows[row][:-1], 77]
    crew = PretendCrew(num_workers, dies=lambda worker, tokens: tokens[-1] == 77)
    engine = fleet(crew, batch_size=4)
    engine.submit(job_of(rows))
    done = drain(engine)
    failed = {row: one for row, one in done.items() if one.finish_reason is FinishReason.ERROR}
    assert failed.keys() == poisoned
    for one in failed.values():
        assert one.error is not None
        assert one.error.code is RowErrorCode.WORKER_LOST
        assert f"{DEATHS_OF_A_ROW} workers were lost with this row" in one.error.message
    kept = {row: one for row, one in done.items() if row not in poisoned}
    assert {row: list(one.token_ids) for row, one in kept.items()} == {
        row: tokens for row, tokens in enumerate(rows) if row not in poisoned
    }


def test_workers_that_only_die_end_the_run() -> None:
    rows = documents(50, 50)
    crew = PretendCrew(2, dies=lambda worker, tokens: True)
    engine = fleet(crew, batch_size=64)
    engine.submit(job_of(rows))
    with pytest.raises(EngineError, match="lost one after the other"):
        drain(engine)
    assert sum(crew.starts) <= 2 + MOST_DEATHS_IN_VAIN + 1


def test_workers_that_never_begin_end_the_run_at_once() -> None:
    class Unborn(PretendCrew):
        def wait(self, timeout_s: float) -> list[tuple[int, Report | Lost]]:
            self.kill(0)
            return [(0, Lost("it did not begin: no module"))]

    crew = Unborn(1)
    with pytest.raises(EngineError, match="the last because it did not begin: no module"):
        fleet(crew)
    assert crew.closed
    assert crew.starts[0] == 1 + MOST_DEATHS_BEFORE_ANY


def test_a_worker_that_takes_no_step_is_replaced_after_its_time() -> None:
    now = [0.0]
    crew = PretendCrew(2, hangs={1})
    engine = fleet(crew, clock=lambda: now[0], batch_size=4)
    rows = documents(2, 20)
    engine.submit(job_of(rows))
    done: dict[int, Completion] = {}
    while engine.has_work:
        now[0] += 1
        done |= {one.row: one for one in engine.step()}
        if crew.starts[1] == 2:
            crew.hangs.clear()
        assert now[0] < 1000
    check_answers(rows, done)
    assert crew.starts == [1, 2]
    assert any("it took no step for 60 s" in text for text in engine.notices)


def test_rows_that_run_again_go_to_the_worker_that_ran_them() -> None:
    rows = documents(6, 20)
    job = job_of(rows)
    crew = PretendCrew(3)
    engine = fleet(crew, batch_size=1000)
    engine.submit(job)
    drain(engine)
    computed = crew.computed_tokens
    again = engine.submit(replace(job))
    while engine.has_work:
        assert {one.job_id for one in engine.step()} <= {again}
    assert crew.computed_tokens == computed
    assert set(crew.ran.values()) == {2}


def test_a_job_of_other_rows_is_cut_anew() -> None:
    crew = PretendCrew(3)
    engine = fleet(crew, batch_size=1000)
    engine.submit(job_of(documents(6, 20)))
    drain(engine)
    rows = documents(2, 9)
    job = job_of(rows)
    before = crew.computed_tokens
    engine.submit(job)
    check_answers(rows, drain(engine))
    assert crew.computed_tokens - before <= job.tree.distinct_tokens * 3


def test_each_part_is_a_job_of_its_own_rows_that_leaves_its_prefixes() -> None:
    rows = documents(3, 7)
    job = job_of(rows)
    crew = PretendCrew(2)
    engine = fleet(crew, batch_size=1000)
    engine.submit(job)
    drain(engine)
    assert len(crew.jobs) > 2
    keys = []
    for _, part in crew.jobs:
        assert part.retain
        assert part.plan == make_plan_of(part)
        assert (
            part.tree.distinct_tokens
            == job_of([t.tolist() for t in each(part)]).tree.distinct_tokens
        )
        for row in range(len(part.tokens)):
            key = int(part.requests.rng_key[row])
            keys.append(key)
            assert part.tokens[row].tolist() == rows[key]
            settings_of = part.requests.settings[part.requests.settings_id[row]]
            assert settings_of == job.requests.settings[key % 2]
    assert sorted(keys) == list(range(len(rows)))


def each(job: EngineJob) -> list[Any]:
    return [job.tokens[row] for row in range(len(job.tokens))]


class make_plan_of:
    """Equal to a plan of the same rows with the same shared prefixes."""

    def __init__(self, job: EngineJob) -> None:
        self.plan = make_plan(job.tokens)

    def __eq__(self, other: object) -> bool:
        mine, theirs = self.plan, other
        return bool((mine.lcp == theirs.lcp).all() and (mine.order == theirs.order).all())  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def test_a_run_that_ends_early_ends_its_workers() -> None:
    crew = PretendCrew(2)
    engine = fleet(crew)
    engine.submit(job_of(documents(2, 9)))
    engine.step()
    engine.close()
    assert crew.closed
    assert not engine.has_work
